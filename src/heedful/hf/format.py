"""Format of a saved folder of a converted model: names, fields, the shim.

Tools that are given nothing but a path call transformers' Auto classes, and these know a model type
only from the process or from the folder. In the folder stands a shim, a file of one import, named
in `config.json` by `auto_map`: with `trust_remote_code=True` transformers runs it.
"""

FORMAT = 2
MODEL_TYPE = "heedful"
SHIM = "open_with_heedful.py"
AUTO = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")

SHIM_TEXT = '''\
"""The weights in this folder are of a model converted by heedful, which must be installed.

To open it, in any of three ways:

    heedful.load(folder)
    heedful.register()                    # then transformers' Auto classes know the folder
    ...from_pretrained(folder, trust_remote_code=True)    # which runs this file
"""

from heedful.hf.auto_classes import HeedfulConfig, HeedfulModel  # noqa: F401
'''

_ADVICE = (
    "heedful: open this folder with heedful.load(folder); with transformers' Auto classes after "
    "heedful.register(); or with these and trust_remote_code=True"
)
# A family's own class reads any configuration and takes its defaults for what it does not find: a
# model of billions of random weights. These fields stop it, each with a message that says why: no
# configuration takes such a vocabulary or text model, and no process knows such an attention.
REFUSED_ELSEWHERE = dict.fromkeys(("attn_implementation", "vocab_size", "text_config"), _ADVICE)


def auto_map(auto_class: str | None) -> dict[str, str]:
    """Map `AutoConfig` and the model's own Auto class to the shim, for `config.json`."""
    module = SHIM.removesuffix(".py")
    models = {} if auto_class is None else {auto_class: f"{module}.HeedfulModel"}
    return {"AutoConfig": f"{module}.HeedfulConfig"} | models
