"""What must be switched off in vLLM, refused by name before anything is loaded."""

from vllm.config import VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig


class Requirements(VerifyAndUpdateConfig):
    """vLLM asks it about a configuration of its own as soon as that is complete."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Raise unless every option leaves the mechanism right; nothing is updated."""
        check_served_with(vllm_config)


def check_served_with(config: VllmConfig) -> None:
    """Raise unless every option of vLLM leaves the mechanism right.

    Raises:
        ValueError: an option is on that cannot be.
    """
    parallel = config.parallel_config
    cache = config.cache_config
    refused = {
        "CUDA graphs and torch.compile, as each request has its own length (enforce_eager=True)": (
            not config.model_config.enforce_eager
        ),
        "prefix caching, as more is kept of a request than pages (enable_prefix_caching=False)": (
            cache.enable_prefix_caching
        ),
        f"a cache of type {cache.cache_dtype!r} (kv_cache_dtype='auto')": (
            cache.cache_dtype != "auto"
        ),
        "tensor parallelism, as heads of all ranks meet in a layer (tensor_parallel_size=1)": (
            parallel.tensor_parallel_size > 1
        ),
        "pipeline parallelism (pipeline_parallel_size=1)": parallel.pipeline_parallel_size > 1,
        "context parallelism (decode_context_parallel_size=1)": (
            parallel.decode_context_parallel_size > 1
        ),
        "speculative decoding, whose rejected tokens would stay in what is kept of a request": (
            config.speculative_config is not None
        ),
        "adapters of vLLM, which would pass layers by (enable_lora=False)": (
            config.lora_config is not None
        ),
        "moving pages between engines (kv_transfer_config)": config.kv_transfer_config is not None,
        "other than generation": config.model_config.runner_type != "generate",
    }
    if unserved := [name for name, on in refused.items() if on]:
        raise ValueError(f"heedful-vllm does not serve {'; nor '.join(unserved)}")
