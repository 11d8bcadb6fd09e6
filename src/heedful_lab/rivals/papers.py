"""The papers behind the baselines, as BibTeX."""

from heedful.papers import Paper, bibtex, cite

_CANON = (
    "allenzhu2025canon",
    "Physics of Language Models: Part 4.1, Architecture Design and the Magic of Canon Layers",
    "Allen-Zhu, Zeyuan", "arXiv:2512.17351", 2025,
)  # fmt: skip
_KNOCKING = (
    "zhou2025knocking", "Knocking-Heads Attention",
    "Zhou, Zhanchao and Chen, Xiaodong and Chen, Haoxing and Lan, Zhenzhong and Li, Jianguo",
    "arXiv:2510.23052", 2025,
)  # fmt: skip
_SIMPLICIAL = (
    "roy2025simplex", "Fast and Simplex: 2-Simplicial Attention in Triton",
    "Roy, Aurko and Chou, Timothy and Duvvuri, Sai Surya and Chen, Sijia and Yu, Jiecao and "
    "Wang, Xiaodong and Zaheer, Manzil and Anil, Rohan", "arXiv:2507.02754", 2025,
)  # fmt: skip
_PRUNED = (
    "szilvasy2026pruned",
    "Self-Pruned Key-Value Attention: Learning When to Write by Predicting Future Utility",
    "Szilvasy, Gergely and Faysse, Manuel and others", "arXiv:2605.14037", 2026,
)  # fmt: skip
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
    "retention-gate": _PRUNED,
    "knocking-heads": _KNOCKING,
    "canon": _CANON,
    "simplicial": _SIMPLICIAL,
}


def cite_rival(name: str) -> str:
    """BibTeX entry of the paper behind a mechanism's name, of a baseline or of the library."""
    if name == "differential-v2":
        return cite("differential")
    return bibtex([_PAPERS[name]]) if name in _PAPERS else cite(name)
