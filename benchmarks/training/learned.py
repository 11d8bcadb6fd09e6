"""Kernels and mixing matrices of a trained model: their numbers, and names for them.

    python -m benchmarks.training.learned runs/training/long-mta-0-2000-0.002 \
        --out runs/learned.jsonl

One line for each kernel of a head and each mixing matrix of a group.
"""

import json

from benchmarks.parts import command_line
from heedful.files import write_whole
from heedful_lab.commands.inspect.patterns import kernel_pattern, mixing_pattern
from heedful_lab.records.environment import environment
from heedful_lab.rivals.models import load

NAMES = {"conv": kernel_pattern, "post_conv": kernel_pattern}
NAMES |= {"mix": mixing_pattern, "post_mix": mixing_pattern}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", help="folder of a model with multi-token attention")
    args = parser.parse_args()
    model = load(args.model)
    parameters = dict(model.named_parameters())
    where, records = environment(), []
    for layer in range(model.config.num_hidden_layers):
        for kind, pattern in NAMES.items():
            ending = f".{layer}.self_attn.heedful.{kind}"
            for name in (name for name in parameters if name.endswith(ending)):
                for number, values in enumerate(parameters[name].detach().double().numpy()):
                    records.append(
                        {"layer": layer, "kind": kind, "number": number}
                        | {"pattern": pattern(values), "values": values.round(4).tolist()}
                        | {"environment": where}
                    )
    write_whole(args.out, "".join(json.dumps(line) + "\n" for line in records))
    for line in records:
        print(line["layer"], line["kind"], line["number"], line["pattern"])


if __name__ == "__main__":
    main()
