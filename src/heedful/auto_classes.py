"""Converted checkpoints for tools that are given nothing but a path.

Such a tool calls transformers' Auto classes, and these know a model type only from the process or
from the folder. In the process, `heedful.register()` tells them, and so do `heedful.load` and
`heedful.convert`. In the folder stands a shim, a file of one import, named in `config.json` by
`auto_map`: with `trust_remote_code=True` transformers runs it, and finds the same classes in it.
"""

from typing import Any

from transformers import PreTrainedConfig

MODEL_TYPE = "heedful"
SHIM = "open_with_heedful.py"

SHIM_TEXT = '''\
"""The weights in this folder are of a model converted by heedful, which must be installed.

To open it, in any of three ways:

    heedful.load(folder)
    heedful.register()                    # then transformers' Auto classes know the folder
    ...from_pretrained(folder, trust_remote_code=True)    # which runs this file
"""

from heedful.auto_classes import HeedfulConfig  # noqa: F401
from heedful.hf.checkpoint import HeedfulModel  # noqa: F401
'''

_ADVICE = (
    "heedful: open this folder with heedful.load(folder); with transformers' Auto classes after "
    "heedful.register(); or with these and trust_remote_code=True"
)
# A family's own class reads any configuration and takes its defaults for what it does not find: a
# model of billions of random weights. These fields stop it, each with a message that says why: no
# configuration takes such a vocabulary or text model, and no process knows such an attention.
REFUSED_ELSEWHERE = dict.fromkeys(("attn_implementation", "vocab_size", "text_config"), _ADVICE)


class HeedfulConfig(PreTrainedConfig):
    """What a saved `config.json` holds, for transformers' Auto classes.

    Numbers, names and flags of the model's own configuration are there too, for tools that ask how
    long a row may be or whether there is an encoder; the model gets its own one whole.
    """

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options):
        from heedful.hf.checkpoint import register  # now that transformers is whole

        register()
        about = config_dict.get("heedful")
        inner = about.get("base") if isinstance(about, dict) else None
        plain = (int, float, str, type(None))
        shown = {
            name: value
            for name, value in (inner if isinstance(inner, dict) else {}).items()
            if isinstance(value, plain)
        }
        own = {name: x for name, x in config_dict.items() if name not in REFUSED_ELSEWHERE}
        return super().from_dict(shown | own, **options)


def register_config() -> None:
    """Make the model type known to `AutoConfig`; repeats do nothing."""
    from transformers.models.auto.configuration_auto import AutoConfig

    AutoConfig.register(MODEL_TYPE, HeedfulConfig, exist_ok=True)


def auto_map(auto_class: str | None) -> dict[str, str]:
    """What `config.json` says of the shim, for `AutoConfig` and the model's own Auto class."""
    module = SHIM.removesuffix(".py")
    models = {} if auto_class is None else {auto_class: f"{module}.HeedfulModel"}
    return {"AutoConfig": f"{module}.HeedfulConfig"} | models
