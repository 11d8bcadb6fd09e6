"""The configuration of a converted folder, as vLLM asks transformers for it."""

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from heedful.hf.load import conversion_in
from heedful.nn import Grouped, MultiToken, from_json
from heedful_vllm.families import FAMILIES, MODEL_TYPE

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
            ValueError: the folder is damaged, or a mechanism or its family is not served.
        """
        about = conversion_in(config_dict, "config.json")
        inner = about["base"]
        family = next(iter(inner.get("architectures") or []), None)
        if family not in FAMILIES:
            raise ValueError(
                f"heedful-vllm serves {', '.join(FAMILIES)}, and this model is a {family}; serve "
                "it with transformers serve"
            )
        for part in about["mechanisms"]:
            _check_served(from_json(part["mechanism"]))
        made = CONFIG_MAPPING[inner["model_type"]].from_dict(inner, **options)
        config = made[0] if isinstance(made, tuple) else made  # with options that nobody used
        config.architectures = [FAMILIES[family]]
        setattr(config, ABOUT, about["mechanisms"])
        return made


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
