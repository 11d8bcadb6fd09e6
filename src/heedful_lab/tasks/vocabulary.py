"""Tokenizers of tasks: bytes, byte pairs trained on a text, or words with their endings."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from heedful.checks import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = 256
_JOINED = "##"  # before an ending that follows a stem without a space


def byte_pairs(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    """A byte-level byte-pair tokenizer: every byte is a token, so every text can be encoded."""
    # Inside the functions: tasks of bytes alone must not need the package.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def bytes_alone() -> "Tokenizer":
    """A tokenizer of bytes whose ids are their values."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # A byte-level vocabulary shows printable bytes as they are, the others from U+0100 on.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(BYTES) if byte not in plain]
    names = {chr(byte): byte for byte in plain}
    names |= {chr(BYTES + i): byte for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def words(stems: Sequence[str], endings: Sequence[str] = ()) -> "Tokenizer":
    """A tokenizer of words between spaces: a stem, then endings; anything else is unknown.

    The longest stem that fits is taken, so none may be another one with an ending behind it.

    Arguments:
        stems: whole words or their beginnings.
        endings: what may follow a stem or another ending.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<unk>", *stems, *(_JOINED + ending for ending in endings)]
    if len(set(names)) < len(names):
        raise UserError("stems and endings must each be there once")
    model = models.WordPiece(
        vocab={name: i for i, name in enumerate(names)},
        unk_token="<unk>",
        continuing_subword_prefix=_JOINED,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix=_JOINED, cleanup=False)
    return tokenizer
