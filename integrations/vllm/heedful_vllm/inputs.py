"""What a layer gets beside queries, keys and values: the input of its module."""

from torch import nn

from heedful_vllm.attention import LayerImpl


def hand_over_input(module: nn.Module) -> None:
    """Let the layer of an attention module of vLLM, whose `attn` has it, get the module's input."""
    impl: LayerImpl = module.attn.impl

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        impl.input = kwargs["hidden_states"]

    module.register_forward_pre_hook(note, with_kwargs=True)
