"""Translations follow from their sources by the rules; measures are those of sacrebleu."""

import re
from dataclasses import replace

import pytest
import sacrebleu

from heedful_lab.tasks import Translate
from heedful_lab.tasks.translate import _language, bleu, spelled, text_error


def read_number(words: list[str]) -> int:
    """The number that target words spell, by their places."""
    digits, tens = _language().digits, _language().tens
    number, words = 0, list(words)
    if _language().hundred in words:
        number = 100 * digits.index(words.pop(0))
        assert words.pop(0) == _language().hundred
    if words and words[0] in digits[1:]:
        number += digits.index(words.pop(0))
        if words:
            assert words.pop(0) == _language().plus
    if words:
        number += 10 * tens.index(words.pop(0))
    assert not words
    return number


def translated(source: str) -> str:
    """The translation of a source, read word by word; nothing else is known."""
    language = _language()
    *words, last = source.split()
    ((_, adverb, topic),) = [x for x in language.adverbs if x[0] == last]
    nouns = {x.word: x for x in language.nouns}
    verbs = {x.word: x for x in language.verbs}
    adjectives, joined = dict(language.adjectives), dict(language.conjunctions)

    def noun_phrase(ending: str):
        first = words.pop(0)
        number = None if first == language.the else int(first)
        adjective = adjectives[words.pop(0)] if words[0] in adjectives else None
        word = words.pop(0)
        plural = word not in nouns
        noun = nouns[word[:-1] if plural else word]
        assert number is None or plural == (number != 1)
        agrees = "kr"[noun.classes[topic]] + "s" * plural
        parts = [noun.stems[topic] + "l" * plural + ending]
        parts += [] if adjective is None else [adjective + agrees]
        parts += [] if number is None else spelled(number, language)
        return noun, agrees, " ".join(parts)

    conjunctions, because = [], language.conjunctions[1][1]
    while True:
        _, agrees, subject = noun_phrase("")
        word = words.pop(0)
        past = word not in verbs
        verb = verbs[word[:-1] if past else word]
        thing, _, object_text = noun_phrase("m")
        clause = f"{subject} {object_text} {verb.stems[thing.living[topic]]}{'sh' * past}{agrees}"
        if not conjunctions:
            whole = clause
        elif conjunctions[-1] == because:
            whole = f"{clause} {because} {whole}"
        else:
            whole = f"{whole} {conjunctions[-1]} {clause}"
        if not words:
            return f"{adverb} {whole}"
        conjunctions.append(joined[words.pop(0)])


@pytest.mark.parametrize("task", [Translate(), Translate(clauses=1), Translate(clauses=5)], ids=str)
def test_a_translation_follows_from_its_source(task):
    pairs = task.texts(600, seed=3)
    for source, target in pairs:
        assert translated(source) == target
    joined = {word for word, _ in _language().conjunctions}
    clauses = [1 + sum(word in joined for word in source.split()) for source, _ in pairs]
    assert set(clauses) == set(range(1, task.clauses + 1))


def test_numbers_are_spelled_so_that_they_can_be_read():
    language = _language()
    assert [read_number(spelled(n, language)) for n in range(1, 1000)] == list(range(1, 1000))
    assert spelled(47, language) == [language.digits[7], language.plus, language.tens[4]]
    assert spelled(300, language) == [language.digits[3], language.hundred]


def test_meanings_depend_on_the_adverb_and_on_the_object():
    """Every homonym, and every verb of two meanings, is met with both."""
    language, pairs = _language(), set()
    for source, target in Translate(clauses=1).texts(4000, seed=0):
        for word in [*language.nouns, *language.verbs]:
            if any(re.fullmatch(f"{word.word}[nt]?", x) for x in source.split()):
                pairs |= {(word.word, stem) for stem in word.stems if stem in target}
    for word in [*language.nouns, *language.verbs]:
        assert {(word.word, stem) for stem in word.stems} <= pairs
    assert sum(len(set(x.stems)) == 2 for x in language.nouns) == 4
    assert sum(len(set(x.stems)) == 2 for x in language.verbs) == 4


def test_held_out_sentences_are_never_trained_on():
    task = Translate()
    trained = {source for step in range(40) for source, _ in task.texts(64, 1 + step)}
    held_out = {source for source, _ in replace(task, part="held-out").texts(2000, 0)}
    assert len(held_out) > 1900 and not trained & held_out
    everything = {task.decode(row) for row in task.batch(64, 5, 7).input_ids}
    assert not everything & held_out


def test_rows_are_the_texts_with_ends_and_padding():
    task = Translate()
    rows = task.sample(50, seed=4)
    again = Translate().sample(50, seed=4)
    assert all(x.equal(y) for x, y in zip(rows, again, strict=True))
    assert not rows.labels.equal(task.sample(50, seed=5).labels)
    assert rows.input_ids.shape == rows.attention_mask.shape
    assert rows.labels.shape == rows.decoder_attention_mask.shape
    assert rows.input_ids.shape[1] <= task.length and rows.labels.shape[1] <= task.target_length
    for i, (source, target) in enumerate(task.texts(50, seed=4)):
        ids, labels = rows.input_ids[i], rows.labels[i]
        size, label_count = (
            int(rows.attention_mask[i].sum()),
            int(rows.decoder_attention_mask[i].sum()),
        )
        assert ids[size - 1] == task.eos and (ids[size:] == task.pad).all()
        assert labels[label_count - 1] == task.eos and (labels[label_count:] == -100).all()
        inside = {*ids[: size - 1].tolist(), *labels[: label_count - 1].tolist()}
        assert not {task.eos, task.pad} & inside
        assert rows.attention_mask[i].tolist() == [1] * size + [0] * (len(ids) - size)
        assert rows.decoder_attention_mask[i].tolist() == [1] * label_count + [0] * (
            len(labels) - label_count
        )
        assert task.decode(ids) == source and task.decode(labels) == target
    mean = (rows.attention_mask.sum() + rows.decoder_attention_mask.sum()).item() / 50
    assert task.row_tokens == pytest.approx(mean, rel=0.15)


def test_bleu_is_that_of_sacrebleu():
    texts = ["the cat sat on the mat .", "a dog", "to be, or not to be?"]
    references = ["the cat sat on a mat .", "a dog barks", "to be, or not to be?"]
    assert bleu(texts, references) == sacrebleu.corpus_bleu(texts, [references]).score
    assert 0 < bleu(texts, references) < 100 == pytest.approx(bleu(texts[2:], references[2:]))
    assert text_error(texts, references) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match=r"one for each of the references, .* 2 texts and 3"):
        bleu(texts[1:], references)


def test_scores_are_those_of_the_texts():
    task = Translate()
    labels = task.sample(30, seed=1).labels
    perfect = task.references(labels)
    assert task.score(perfect, labels) == {"bleu": pytest.approx(100), "error": 0.0}
    worse = [x if i % 3 else "" for i, x in enumerate(perfect)]
    assert task.score(worse, labels)["error"] == pytest.approx(1 / 3)
    assert task.score(worse, labels)["bleu"] < 90


def test_rows_of_a_generated_language_have_their_own_length():
    with pytest.raises(
        ValueError, match="length: sequences of Translate are as long as what they hold"
    ):
        Translate().cut(64, "byte")
    assert Translate(paths=("x",)).cut(64, "bpe").target_length == 64
