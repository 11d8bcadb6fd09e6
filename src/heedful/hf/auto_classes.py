"""Classes with which transformers' Auto classes open saved folders of converted models.

Importing `heedful.hf` tells them in this process, as `heedful.register()` and all else does.
"""

from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from heedful.hf.load import load
from heedful.hf.save import AUTO, MODEL_TYPE, REFUSED_ELSEWHERE
from heedful.hf.versions import implementation_of


class HeedfulConfig(PreTrainedConfig):
    """Configuration in a saved `config.json`, for transformers' Auto classes.

    Numbers, names and flags of the model's own configuration are there too, for tools that ask how
    long a row may be or whether there is an encoder; the model gets its own one whole.
    """

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options):
        about = config_dict.get("heedful")
        inner = about.get("base") if isinstance(about, dict) else None
        plain = (int, float, str, type(None))
        common = {
            name: value
            for name, value in (inner if isinstance(inner, dict) else {}).items()
            if isinstance(value, plain)
        }
        own = {name: x for name, x in config_dict.items() if name not in REFUSED_ELSEWHERE}
        return super().from_dict(common | own, **options)


class HeedfulModel(PreTrainedModel):
    """Class that transformers' Auto classes call to open a converted checkpoint."""

    config_class = HeedfulConfig

    @classmethod
    def from_pretrained(cls, folder, *args, config=None, **options) -> PreTrainedModel:
        """As `heedful.load`."""
        # The Auto classes take it out of their options and put it into the configuration.
        if config is not None and implementation_of(config) is not None:
            options["attn_implementation"] = implementation_of(config)
        return load(folder, **options)


def register() -> None:
    """Register converted models' checkpoints with transformers' Auto classes; repeats do nothing.

    `heedful.load` and `heedful.convert` do this too. Call it in a process that passes the path of a
    saved folder to a tool which knows only the Auto classes.
    """
    AutoConfig.register(MODEL_TYPE, HeedfulConfig, exist_ok=True)
    for name in AUTO:
        getattr(transformers, name).register(HeedfulConfig, HeedfulModel, exist_ok=True)
