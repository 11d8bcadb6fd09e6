"""The configuration of a converted folder, as vLLM asks transformers for it."""

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from heedful.hf.load import conversion_in
from heedful.nn import Grouped, MultiToken, from_json
from heedful_vllm.families import FAMILIES, MODEL_TYPE
from heedful_vllm.version import check_version

ABOUT = "heedful"
"""What the family's configuration calls the mechanisms of the model."""


class ServedConfig(PreTrainedConfig):
    """Reads the `config.json` of a converted folder; never stays, for the family's takes its place.

    So vLLM finds heads, layers, positions and all else where every model of the family has them.
    """

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options):
        """The family's own configuration, which also names the mechanisms and our model class.

        Raises:
            ValueError: the folder is damaged, or a mechanism or its family is not served, or this
                vLLM is another than was tested.
        """
        check_version()
        about = conversion_in(config_dict, "config.json")
        inner = about["base"]
        family = next(iter(inner.get("architectures") or []), None)
        if family not in FAMILIES:
            raise ValueError(
                f"heedful-vllm serves {', '.join(FAMILIES)}, and this model is a {family}; serve "
                "it with transformers serve"
            )
        _check_heads(family, inner)
        for part in about["mechanisms"]:
            _check_served(from_json(part["mechanism"]))
        result = CONFIG_MAPPING[inner["model_type"]].from_dict(inner, **options)
        config = result[0] if isinstance(result, tuple) else result  # with options that nobody used
        config.architectures = [FAMILIES[family]]
        setattr(config, ABOUT, about["mechanisms"])
        return result


def _check_heads(family: str, config: dict[str, Any]) -> None:
    """Raise where vLLM would cut heads otherwise than transformers, and say nothing."""
    width = config["hidden_size"] // config["num_attention_heads"]
    if family == "Qwen2ForCausalLM" and config.get("head_dim") not in (None, width):
        raise ValueError(
            f"heedful-vllm: head_dim must be hidden_size / num_attention_heads = {width} in a "
            f"Qwen2, as vLLM reads no other, got {config['head_dim']}; serve it with transformers "
            "serve"
        )


def _check_served(mechanism: object) -> None:
    """Raise unless vLLM can serve this mechanism, with the way out."""
    way = "serve it with transformers serve"
    if isinstance(mechanism, Grouped):
        raise ValueError(
            f"heedful-vllm serves every mechanism but grouped attention, got {mechanism}: its "
            f"summaries of groups are not keys and values of tokens, as pages have them; {way}"
        )
    if isinstance(mechanism, MultiToken) and mechanism.input_scaling != "none":
        raise ValueError(
            f"heedful-vllm does not scale the inputs of layers, got {mechanism}; {way}"
        )
