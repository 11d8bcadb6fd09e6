"""One self-contained HTML page about a text: what every layer and head does with it."""

import base64
import html
import json
from pathlib import Path

import numpy as np

from heedful.files import write_whole
from heedful_lab.commands.inspect.arrays import MOST_BYTES, PageData
from heedful_lab.records.page import PAGE

_PARTS = Path(__file__).parent / "browser"
_SCRIPTS = ("data.js", "text.js", "maps.js", "overview.js", "gallery.js", "main.js")
MOST_PAGE = MOST_BYTES * 4 // 3 + 2**20  # base64 takes 4 for 3; text, style and script the rest


def write_inspection(path: str | Path, data: PageData) -> Path:
    """Write the page and return its path; it replaces an earlier one only when it is whole.

    The page loads nothing from anywhere. It has at most `MOST_PAGE` bytes, 65 MiB, however long
    the text is: of long ones fewer keys of every row are shown.

    Arguments:
        path: the file.
        data: what `page_data` made.
    """
    path = Path(path)
    write_whole(path, _page(data))
    return path


def _page(data: PageData) -> str:
    about = dict(data.about)
    names = sorted(data.arrays)
    about["arrays"] = {
        name: [number, data.arrays[name].dtype.name, list(data.arrays[name].shape)]
        for number, name in enumerate(names)
    }
    blobs = [
        f'<script type="text/plain" id="a{number}">{_base64(data.arrays[name])}</script>'
        for number, name in enumerate(names)
    ]
    script = "\n".join((_PARTS / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    return PAGE.substitute(
        title=html.escape(f"Inside {about['model']}"),
        lead=_lead(about),
        body=(_PARTS / "body.html").read_text(encoding="utf-8"),
        style=(_PARTS / "style.css").read_text(encoding="utf-8"),
        script=f'<script type="application/json" id="about">{_json(about)}</script>\n'
        + "\n".join(blobs)
        + f'\n<script>"use strict";\n(() => {{\n{script}\n}})();</script>\n',
    )


def _lead(about: dict) -> str:
    tokens, layers = len(about["tokens"]), about["layers"]
    mechanisms = about["mechanisms"]
    if len(mechanisms) == 1:
        conversion = next(iter(mechanisms))
    else:
        conversion = "; ".join(
            f"{name} in layers {', '.join(map(str, where))}" for name, where in mechanisms.items()
        )
    heads = sorted({(layer["heads"], layer["unit"]) for layer in layers})
    words = " or ".join(f"{n} {unit}{'s' * (n != 1)}" for n, unit in heads)
    text = (
        f"{tokens:,} token{'s' * (tokens != 1)} through {len(layers)} "
        f"layer{'s' * (len(layers) != 1)} of {words}: {conversion}."
    )
    if about["policy"]:
        text += f" Caches under {about['policy']}."
    return html.escape(text)


def _base64(x: np.ndarray) -> str:
    little = x.astype(x.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(np.ascontiguousarray(little).tobytes()).decode()


def _json(value: object) -> str:
    """JSON inside HTML: no text can end the element that it stands in."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
