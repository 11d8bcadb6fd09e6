"""The folder of an evaluation: its answers, and the models that gave them."""

import inspect
import json
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from heedful.checks import UserError
from heedful.eviction import POLICIES
from heedful.files import write_whole
from heedful.hf.identity import files_digest, json_digest, model_identity
from heedful.training.checkpoints import differences
from heedful_lab.commands.evaluate.answers import LanguageModel
from heedful_lab.commands.evaluate.harness import HarnessResult
from heedful_lab.commands.models import ModelSource
from heedful_lab.records import Sample, append, read
from heedful_lab.records.environment import environment

SAMPLES, ABOUT = "samples.jsonl", "evaluation.json"
_FORMAT = 2
_OLDER = (
    "was written by an older version, which did not note the weights, adapter, budgets and dtype "
    "that its answers belong to; choose another --out, or add --restart to begin anew"
)
WHOLE = ""


class AnswerStore:
    """The folder of an evaluation: what was answered, and by which models.

    Arguments:
        folder: with samples.jsonl and evaluation.json, or new.
        config: the options, as JSON.
        restart: begin anew, whatever is there.

    Raises:
        ValueError: a file is damaged.
    """

    def __init__(self, folder: Path, config: dict, *, restart: bool = False) -> None:
        self.path, self.about_path = folder / SAMPLES, folder / ABOUT
        self.about = {"format": _FORMAT, "models": {}, "lm_eval": {}}
        if restart:
            self.path.unlink(missing_ok=True)
            self.about_path.unlink(missing_ok=True)
        if self.about_path.exists():
            try:
                self.about |= json.loads(self.about_path.read_bytes())
                if self.about["format"] not in (1, _FORMAT):
                    raise UserError(f"its format is {self.about['format']}, not {_FORMAT}")
                if not all(isinstance(self.about[x], dict) for x in ("models", "lm_eval")):
                    raise UserError("it lists no models")
            except (ValueError, TypeError) as error:
                raise UserError(
                    f"{self.about_path} is damaged ({error}); delete it, and {SAMPLES} beside it "
                    "is read again, or add --restart to begin anew"
                ) from None
            if self.about["format"] == 1:
                raise UserError(f"{self.about_path} {_OLDER}")
        samples = read(self.path, Sample)
        if not all(sample.identity for sample in samples):
            raise UserError(f"{self.path} {_OLDER}")
        self._samples = {(x.model, x.cache, x.task, x.key): x for x in samples}
        self.about["config"] = json.loads(json.dumps(config))
        self.about["environment"] = environment()

    def register(
        self,
        source: ModelSource,
        model: PreTrainedModel,
        caches: dict[str, LanguageModel],
    ) -> None:
        """Note which model goes by a name, and what its caches by theirs.

        Raises:
            ValueError: it was another model before, or a cache had another policy.
        """
        about = model_identity(model)
        about |= {"tokenizer": source.tokenizer, "dtype": str(model.dtype)}
        before = self.about["models"].get(source.name, {})
        changed = [name for name in about if name in before and before[name] != about[name]]
        if changed:
            verb = "differs" if len(changed) == 1 else "differ"
            raise UserError(
                f"{self.about_path} knows another model by the name {source.name!r} "
                f"({', '.join(changed)} {verb}); choose another --out, or add --restart"
            )
        own = {name: _cache_identity(answers) for name, answers in caches.items()}
        noted = before.get("caches", {})
        for name in noted.keys() & own.keys():
            if noted[name] != own[name]:
                raise UserError(
                    f"{self.about_path} has answers of {source.name!r} with another cache by the "
                    f"name {name!r}: {'; '.join(differences(noted[name], own[name]))}; choose "
                    "another --out, or add --restart"
                )
        self.about["models"][source.name] = about | {"caches": noted | own}
        self._write_about()

    def identity(self, model: str, cache: str) -> str:
        """A digest of a registered model, its adapter and its cache."""
        about = dict(self.about["models"][model])
        return json_digest([about.pop("caches")[cache], about])

    def sample_of(self, model: str, cache: str, item: tuple[str, str]) -> Sample | None:
        """The answer that is kept, if there is one."""
        return self._samples.get((model, cache, *item))

    def add(self, samples: Sequence[Sample]) -> None:
        """Keep answers; they are on disk when this returns."""
        append(self.path, *samples)
        self._samples |= {(x.model, x.cache, x.task, x.key): x for x in samples}

    def harness(self, model: str, name: str, cache: str = WHOLE) -> HarnessResult | None:
        """The results of lm-evaluation-harness for a name, if it has been run."""
        entry = self.about["lm_eval"].get(model, {}).get(_with_cache(name, cache))
        if entry is None or entry["identity"] != self._harness_identity(model, cache):
            return None
        return HarnessResult(entry["results"], [Sample.from_json(x) for x in entry["samples"]])

    def keep_harness(self, model: str, name: str, result: HarnessResult, cache: str) -> None:
        """Keep the results of lm-evaluation-harness for a name."""
        entry = {"identity": self._harness_identity(model, cache), "results": result.results}
        entry["samples"] = [sample.to_json() for sample in result.samples]
        self.about["lm_eval"].setdefault(model, {})[_with_cache(name, cache)] = entry
        self._write_about()

    def _harness_identity(self, model: str, cache: str) -> dict:
        """Options that decide the harness's results."""
        names = ("samples", "seed", "lm_eval_tasks")
        return {"of": self.identity(model, cache)} | {x: self.about["config"][x] for x in names}

    def _write_about(self) -> None:
        write_whole(self.about_path, json.dumps(self.about, indent=1) + "\n")


def _cache_identity(answers: LanguageModel) -> dict:
    """The policy, its arguments and the dtype of a cache, as JSON."""
    policy = answers.eviction or None
    about = {"policy": policy and repr(policy), "dtype": answers.dtype and str(answers.dtype)}
    if policy is not None and type(policy) not in POLICIES:
        about["source"] = files_digest([Path(inspect.getfile(type(policy)))])
    return about


def _with_cache(name: str, cache: str) -> str:
    return f"{name}, {cache}" if cache else name
