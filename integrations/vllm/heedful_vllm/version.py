"""Which vLLM the plugin is made for: its models and attention change with every version."""

import vllm

TESTED = "0.32"


def is_tested() -> bool:
    """Whether this vLLM is that one."""
    return ".".join(vllm.__version__.split(".")[:2]) == TESTED


def check_version() -> None:
    """Raise unless this vLLM is the one that was tested.

    Raises:
        ValueError: it is another.
    """
    if not is_tested():
        raise ValueError(
            f"heedful-vllm is made for vLLM {TESTED}, got {vllm.__version__}; pip install "
            f"'vllm=={TESTED}.*'"
        )
