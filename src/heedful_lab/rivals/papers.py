"""The papers behind the baselines, as BibTeX."""

from heedful.papers import Paper, bibtex, cite

_EXCLUSIVE = (
    "zhai2026exclusive", "Exclusive Self Attention", "Zhai, Shuangfei", "arXiv:2603.09078", 2026,
)  # fmt: skip
_PARALLAX = (
    "zuo2026parallax", "Parallax: Parameterized Local Linear Attention for Language Modeling",
    "Zuo, Yifei and Pai, Dhruv and Zeng, Zhichen and Dewulf, Alec and Hu, Shuming and "
    "Wang, Zhaoran", "arXiv:2605.29157", 2026,
)  # fmt: skip
_DEX = (
    "kong2025unchains",
    "Understanding Differential Transformer Unchains Pretrained Self-Attentions",
    "Kong, Chaerin and Jang, Jiho and Kwak, Nojun", "arXiv:2505.16333", 2025,
)  # fmt: skip
_PAPERS: dict[str, Paper] = {
    "exclusive": _EXCLUSIVE,
    "parallax": _PARALLAX,
    "dex": _DEX,
}


def cite_rival(name: str) -> str:
    """BibTeX entry of the paper behind a mechanism's name, of a baseline or of the library."""
    if name == "differential-v2":
        return cite("differential")
    return bibtex([_PAPERS[name]]) if name in _PAPERS else cite(name)
