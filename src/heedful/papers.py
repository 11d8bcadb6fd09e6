"""The papers behind a mechanism or a converted model, as BibTeX."""

from collections.abc import Iterable

from transformers import PreTrainedModel

from heedful.checks import UserError
from heedful.hf import conversion_of
from heedful.nn import (
    Differential,
    Forgetting,
    Gated,
    Grouped,
    LocalGlobal,
    MechanismConfig,
    MultiToken,
    Selective,
    SelectiveMultiToken,
    Standard,
    TalkingHeads,
    mechanism,
)

Paper = tuple[str, str, str, str, int]
"""Key, title, authors, journal and year."""

_ARTICLE = """@article{{{key},
  title = {{{title}}},
  author = {{{authors}}},
  journal = {{{journal}}}, year = {{{year}}}
}}"""
_MULTI_TOKEN = (
    "golovneva2025multitoken", "Multi-Token Attention",
    "Golovneva, Olga and Wang, Tianlu and Weston, Jason and Sukhbaatar, Sainbayar",
    "arXiv:2504.00927", 2025,
)  # fmt: skip
_TALKING = (
    "shazeer2020talking", "Talking-Heads Attention",
    "Shazeer, Noam and Lan, Zhenzhong and Cheng, Youlong and Ding, Nan and Hou, Le",
    "arXiv:2003.02436", 2020,
)  # fmt: skip
_SELECTIVE = (
    "leviathan2024selective", "Selective Attention Improves Transformer",
    "Leviathan, Yaniv and Kalman, Matan and Matias, Yossi", "arXiv:2410.02703", 2024,
)  # fmt: skip
_DIFFERENTIAL = (
    "ye2024differential", "Differential Transformer",
    "Ye, Tianzhu and Dong, Li and Xia, Yuqing and Sun, Yutao and Zhu, Yi and Huang, Gao and "
    "Wei, Furu", "arXiv:2410.05258", 2024,
)  # fmt: skip
_GEMMA = ("gemma2025", "Gemma 3 Technical Report", "Gemma Team", "arXiv:2503.19786", 2025)
_GATED = (
    "qiu2025gated", "Gated Attention for Large Language Models", "Qiu, Zihan and others",
    "arXiv:2505.06708", 2025,
)  # fmt: skip
_FORGETTING = (
    "lin2025forgetting", "Forgetting Transformer: Softmax Attention with a Forget Gate",
    "Lin, Zhixuan and Nikishin, Evgenii and He, Xu Owen and Courville, Aaron",
    "arXiv:2503.02130", 2025,
)  # fmt: skip
_MERGING = (
    "bolya2023merging", "Token Merging: Your ViT But Faster", "Bolya, Daniel and others",
    "arXiv:2210.09461", 2023,
)  # fmt: skip
_PAPERS = {
    Standard: (),
    LocalGlobal: (_GEMMA,),
    MultiToken: (_MULTI_TOKEN,),
    TalkingHeads: (_TALKING,),
    Selective: (_SELECTIVE,),
    SelectiveMultiToken: (_MULTI_TOKEN, _SELECTIVE),
    Differential: (_DIFFERENTIAL,),
    Gated: (_GATED,),
    Forgetting: (_FORGETTING,),
    Grouped: (_MERGING,),
}


def cite(source: str | MechanismConfig | PreTrainedModel) -> str:
    """BibTeX entries of the papers whose mechanism this is, or whose mechanisms a model has.

    Arguments:
        source: a mechanism's name, such as `"mta"`, its configuration, or a converted model.

    Returns:
        The entries, a blank line between them; empty for standard attention.

    Raises:
        ValueError: no such mechanism, or the model is not converted.
    """
    if isinstance(source, PreTrainedModel):
        configs = list(conversion_of(source).mechanisms)
    else:
        configs = [mechanism(source) if isinstance(source, str) else source]
    if unknown := [config for config in configs if type(config) not in _PAPERS]:
        raise UserError(
            "source must be one of heedful's mechanisms by name, its configuration, or a model "
            f"converted to it, got {unknown[0]!r}; the source of another is where it is defined"
        )
    return bibtex(dict.fromkeys(paper for x in configs for paper in _PAPERS[type(x)]))


def bibtex(papers: Iterable[Paper]) -> str:
    """Format papers as BibTeX, a blank line between them."""
    fields = ("key", "title", "authors", "journal", "year")
    return "\n\n".join(_ARTICLE.format(**dict(zip(fields, x, strict=True))) for x in papers)
