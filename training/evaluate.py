"""Evaluate the bundled models: held-out bits per byte and the draft's accept length, to JSON."""

import json
import platform
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import transformers
import typer
from transformers import AutoTokenizer

from slipstream.training import accept_length, bits_per_byte, checkpoint, options
from slipstream.training.accept_length import Setting

SAMPLED = Setting()
HOT = Setting(temperature=1.0)
GREEDY = Setting(temperature=0.0, num_tokens=16, seeds=(0,))


def heldout_files(corpus: Path, limit: int | None) -> tuple[list[list[int]], int]:
    """Token ids of the held-out files, end-of-text first, and their size in bytes of UTF-8."""
    stream = np.load(corpus / "heldout.npy").tolist()
    index = json.loads((corpus / "heldout.json").read_text())
    files: list[list[int]] = []
    begin = 0
    for entry in index:
        end = begin + 1 + entry["tokens"]
        files.append(stream[begin:end])
        begin = end
    return files[:limit], sum(entry["bytes"] for entry in index[:limit])


def natural_share(files: list[list[int]]) -> float:
    """Repeated 5-gram share of the held-out text, in pieces as long as the sampled outputs."""
    length = SAMPLED.num_tokens
    pieces = [file[i : i + length] for file in files for i in range(1, len(file) - length, length)]
    return sum(map(accept_length.repeated_share, pieces)) / len(pieces)


def hardware(device: torch.device) -> str:
    """The name of the device that the figures were computed on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU"


def main(
    corpus: Annotated[Path, typer.Option(help="Folder with heldout.npy and heldout.json.")],
    target: options.Target,
    prompts: Annotated[Path, typer.Option(help="Held-out prompts, JSON lines.")],
    out: Annotated[Path, typer.Option(help="The results, JSON.")],
    standalone: Annotated[Path | None, typer.Option(help="Folder of the draft model.")] = None,
    num_files: Annotated[int | None, typer.Option(help="Only the first held-out files.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Only the first prompts.")] = None,
    device: options.Device = "cuda",
) -> None:
    """Evaluate the weights as stored (bfloat16), computing in float32."""
    where = torch.device(device)
    model = checkpoint.load(target, where)
    files, num_bytes = heldout_files(corpus, num_files)
    context = checkpoint.CONTEXT_TOKENS
    results: dict[str, object] = {
        "hardware": hardware(where),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "compute_dtype": "float32",
        "target": {"parameters": checkpoint.num_parameters(model)},
        "heldout": bits_per_byte.measure(model, files, num_bytes, context=context, stride=context // 2),
        "heldout_repeated_5gram_share": natural_share(files),
    }
    if standalone is not None:
        tokenizer = AutoTokenizer.from_pretrained(target)
        lines = prompts.read_text(encoding="utf-8").splitlines()[:num_prompts]
        ids = [tokenizer.encode(json.loads(line)["text"]) for line in lines]
        draft = checkpoint.load(standalone, where)
        results["standalone"] = {
            "parameters": checkpoint.num_parameters(draft),
            "heldout": bits_per_byte.measure(draft, files, num_bytes, context=context, stride=context // 2),
            "accept_length": [accept_length.measure(model, draft, ids, setting) for setting in (SAMPLED, GREEDY, HOT)],
        }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")
    typer.echo(json.dumps(results, indent=2))


if __name__ == "__main__":
    options.run(main)
