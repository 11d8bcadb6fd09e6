"""Serves models converted by heedful with vLLM.

vLLM calls `register` in each of its processes, by an entry point.
"""

from heedful_vllm.families import FAMILIES, MODEL_TYPE


def register() -> None:
    """Tell vLLM and transformers of converted folders, in this process; repeats do nothing.

    With another vLLM than the tested one, folders are known and refused, and nothing else changes.
    """
    from transformers import AutoConfig

    from heedful_vllm.config import ServedConfig
    from heedful_vllm.version import is_tested

    AutoConfig.register(MODEL_TYPE, ServedConfig, exist_ok=True)
    if not is_tested():
        return
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from heedful_vllm.checks import Requirements

    for served in FAMILIES.values():
        # By its name: importing a model may start a GPU, which a process that forks must not.
        ModelRegistry.register_model(served, f"heedful_vllm.model:{served}")
        MODELS_CONFIG_MAP[served] = Requirements
