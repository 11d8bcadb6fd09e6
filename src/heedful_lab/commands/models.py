"""Models and tokenizers by their names on the command line."""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from heedful.checks import UserError
from heedful.data import ByteTokenizer
from heedful.eviction import Eviction
from heedful.hf.adapter_folders import base_of, is_adapter, read_about
from heedful.hf.budgets import NAME as BUDGETS
from heedful.hf.budgets import take_budgets
from heedful.hf.convert import replace_attention
from heedful.hf.converted_model import ConvertedModel
from heedful.hf.evicting.new import needs_conversion
from heedful.hf.load import saved_conversion
from heedful.hf.stock import is_gguf, stock_config, stock_model, stock_tokenizer
from heedful.nn import MechanismConfig
from heedful_lab.commands.options import ModelDtype, check_device
from heedful_lab.rivals.models import load
from heedful_lab.rivals.table import from_json, mechanism

BYTES = "bytes"

_MOST_BYTES = 512  # tokens of a model of bytes: 256, a few of its own, and rounded up


def device_of(name: str) -> torch.device:
    """The device of this name; `auto` is the GPU where torch sees one.

    Raises:
        ValueError: this is not the name of a device, or there is no such device here.
    """
    check_device(name)
    cuda = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if cuda else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not cuda:
        raise UserError(f"device={name!r} needs a GPU, and torch sees none; use cpu")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        seen = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise UserError(f"device={name!r} is not there: torch sees {seen}; use one of these")
    return device


def device_in_words(name: str) -> str:
    """The device of this name, with the name of the GPU that it is."""
    device = device_of(name)
    if device.type == "cpu":
        return "cpu"
    return f"{device} ({torch.cuda.get_device_name(device)})"


def open_model(
    name: str,
    device: str = "cpu",
    *,
    dtype: ModelDtype = "auto",
    adapter: str | None = None,
    budgets: bool = True,
    convert: bool = True,
) -> PreTrainedModel:
    """A model as it is saved, an ordinary one with standard attention of heedful or its own.

    Arguments:
        name: a folder of a model or an adapter, or what `heedful.hf.stock.stock_model` opens.
        device: `auto`, `cpu`, `cuda` or `cuda:N`, as for `device_of`.
        dtype: of the weights and the computation; `auto` is that of the files.
        adapter: the folder of an adapter, for an ordinary model.
        budgets: take the `budgets.json` beside the model or the adapter, if any.
        convert: as for `heedful.load`; without it an ordinary model stays as it is.

    Raises:
        ValueError: there is no such model, it cannot be read, or cannot be converted.
    """
    place, options = device_of(device), dtype_option(dtype)
    if adapter is None and is_adapter(name):
        name, adapter = base_of(name), name
    folder = Path(name if adapter is None else adapter)
    if adapter is None and folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"model {name!r} is a folder without a config.json; name a model's folder")
    with opening("model", name):
        if adapter is not None:
            model = load(name, adapter=adapter, budgets=False, convert=convert, **options)
        elif is_converted(folder):
            model = load(folder, budgets=False, convert=convert, **options)
        else:
            model = stock_model(name, **options)
            has_budgets = budgets and (folder / BUDGETS).is_file()
            if convert or has_budgets:
                replace_attention(model, "standard", attends=convert)
    if budgets and folder.is_dir():
        take_budgets(folder, model)
    return model.eval().to(place)


def convert_if_needed(model: PreTrainedModel, *policies: Eviction | Literal[False] | None) -> None:
    """Give an ordinary model standard attention of heedful where a cache needs it for a policy."""
    needed = any(needs_conversion(model, policy or None) for policy in policies)
    if needed and not isinstance(model, ConvertedModel):
        replace_attention(model, "standard")


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model as a command line names it, with its tokenizer; nothing is open yet.

    Arguments:
        name, device, dtype, adapter: as for `open_model`.
        tokenizer: as for `open_tokenizer`.
    """

    name: str
    device: str = "cpu"
    dtype: ModelDtype = "auto"
    adapter: str | None = None
    tokenizer: str | None = None

    def open(self, *, budgets: bool = True, convert: bool = True) -> PreTrainedModel:
        """The model, as `open_model` opens it."""
        return open_model(
            self.name,
            self.device,
            dtype=self.dtype,
            adapter=self.adapter,
            budgets=budgets,
            convert=convert,
        )

    def open_tokenizer(self, model: PreTrainedModel):
        """The tokenizer for the opened model, as `open_tokenizer` opens it."""
        return open_tokenizer(self.tokenizer, self.name, model)


def dtype_option(dtype: ModelDtype) -> dict[str, torch.dtype]:
    """The option of `from_pretrained` for a command's `--dtype`; none for that of the files."""
    return {} if dtype == "auto" else {"dtype": getattr(torch, dtype)}


def configuration_of(name: str) -> tuple[PreTrainedConfig, list[str]]:
    """A model's configuration, and what it is converted to.

    Arguments:
        name: as for `open_model`, or a configuration (FILE.json).

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    path = Path(name)
    try:
        if path.suffix == ".json":
            fields = json.loads(path.read_text())
            return AutoConfig.for_model(fields.pop("model_type"), **fields), []
        if is_adapter(path):
            mechanisms = [str(from_json(x["mechanism"])) for x in read_about(path)["mechanisms"]]
            return stock_config(base_of(path)), mechanisms
        if not is_converted(path):
            return stock_config(name), []
        about = saved_conversion(path)
        mechanisms = [str(from_json(part["mechanism"])) for part in about["mechanisms"]]
        return AutoConfig.for_model(**about["base"]), mechanisms
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"model {name!r} has no configuration that can be read: {_problem(name, error)}; name "
            'a folder, a name on the hub, or a FILE.json with "model_type" and the fields of that '
            "type"
        ) from None


@contextmanager
def opening(what: str, name: str) -> Iterator[None]:
    """Whatever transformers raises for a model that is not there or cut short, as a `ValueError`.

    Arguments:
        what: what the name is called, such as `model`.
        name: a folder, or a name on the Hugging Face hub.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        problem = _problem(name, error)
        raise UserError(f"{what} {name!r} cannot be opened: {problem}") from None


def _problem(name: str, error: Exception) -> str:
    """An error's message in one line; a name may be a misspelt folder."""
    message = " ".join(str(error).split())[:600].rstrip(".")
    if Path(name).exists() or name.endswith(".json") or is_gguf(name):
        return message
    return f"there is no such folder, and the hub does not have it: {message}"


def is_converted(folder: Path) -> bool:
    """Test whether a folder holds a model that heedful converted."""
    path = folder / "config.json"
    if not path.is_file():
        return False
    try:
        saved = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); the model is damaged") from None
    return isinstance(saved, dict) and saved.get("model_type") == "heedful"


def open_tokenizer(name: str | None, model_name: str, model: PreTrainedModel):
    """The tokenizer of this name, by default the model's own; `bytes` is one without a file.

    Raises:
        ValueError: there is none, or it has more tokens than the model.
    """
    return tokenizer_named(name, model_name, model.get_input_embeddings().weight.shape[0])


def tokenizer_named(name: str | None, model_name: str, rows: int):
    """As `open_tokenizer`, of a model that need not be open: it has so many tokens."""
    if name == BYTES:
        if rows > _MOST_BYTES:
            raise UserError(
                f"tokenizer 'bytes' has 256 tokens and the model {rows}, which are not bytes; name "
                "the model's own tokenizer"
            )
        tokenizer = ByteTokenizer()
    else:
        transformers.logging.set_verbosity_error()
        try:
            tokenizer = stock_tokenizer(name or base_of(model_name))
        except Exception as error:  # whatever tokenizers raise for a file that is none of theirs
            problem = " ".join(str(error).split())[:200]
            hint = f"; this model has {rows} tokens: --tokenizer bytes if these are bytes"
            raise UserError(
                f"tokenizer {name or model_name!r} cannot be read ({problem})"
                f"{hint if rows <= _MOST_BYTES else ''}; name one with --tokenizer"
            ) from None
    if len(tokenizer) > rows:
        raise UserError(
            f"tokenizer {name or model_name!r} has {len(tokenizer)} tokens and the model {rows}; "
            "it belongs to another model"
        )
    return tokenizer


def longest(model: nn.Module) -> int | None:
    """Number of tokens the model has positions for, by its configuration."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None)


def mechanisms_named(words: Sequence[str]) -> dict[MechanismConfig, tuple[int, ...] | None]:
    """Mechanisms as the command line spells them, with the layers of each; None is all the rest.

    A word is NAME[:OPTION=VALUE,...][@LAYERS], such as `mta:conv_every=1,norm=true` or
    `selective@0-2,5`.

    Raises:
        ValueError: a word is not valid, or names an unknown mechanism, option or value.
    """
    mechanisms: dict[MechanismConfig, tuple[int, ...] | None] = {}
    for word in words:
        match = re.fullmatch(r"([^:@]+)(?::([^@]+))?(?:@([\d,-]+))?", word)
        if match is None:
            raise UserError(
                f"mechanism must be spelled NAME[:OPTION=VALUE,...][@LAYERS], got {word!r}; as in "
                "mta:conv_every=1@0-3"
            )
        config = _with_options(mechanism(match[1]), match[1], match[2] or "")
        if config in mechanisms:
            raise UserError(f"mechanism {word!r} is there twice; name all its layers in one word")
        mechanisms[config] = None if match[3] is None else _indices(word, match[3])
    if len(mechanisms) > 1 and None in mechanisms.values():
        raise UserError(
            "mechanism: of several, each must say its layers, as in selective@0-2 mta@3; the "
            "other layers keep standard attention"
        )
    return mechanisms


def _with_options(config: MechanismConfig, name: str, options: str) -> MechanismConfig:
    fields = [field.name for field in dataclasses.fields(config)]
    values = {}
    for option in re.split(r",(?![^\[]*\])", options) if options else ():
        key, equals, value = option.partition("=")
        if not equals or key not in fields:
            raise UserError(
                f"mechanism {name} has no option {option!r}; it has {', '.join(fields) or 'none'}, "
                "spelled as in conv_every=1"
            )
        try:
            read = json.loads(value)
        except ValueError:
            read = value  # a word
        values[key] = tuple(read) if isinstance(read, list) else read
    return dataclasses.replace(config, **values)


def _indices(word: str, text: str) -> tuple[int, ...]:
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UserError(f"mechanism {word!r}: layers are numbers and ranges, as in @0-2,5")
        layers += range(int(first), int(last if dash else first) + 1)
    return tuple(layers)


def read_text(path: Path) -> str:
    """A text file, which must be UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"file {path} is not UTF-8 text; convert it (iconv -t UTF-8)") from None


def size_in_words(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
