"""The command `fwzoo`: its options, and how a complaint about them looks. What it does is in `fwzoo.commands`."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fwzoo._version import __version__
from fwzoo.commands.evaluate import ablate_app, eval_app
from fwzoo.commands.options import number as _number

app = typer.Typer(
    name="fwzoo",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(eval_app)
app.add_typer(ablate_app)

# The base of every complaint about the command line: click's, from wherever this version of typer takes it.
_UsageError: Any = typer.BadParameter.__mro__[1]


def main() -> NoReturn:
    """Run the command line. Bad input ends with one sentence on standard error and exit code 2."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except _UsageError as error:
        if int(os.environ.get("RANK", 0)) == 0:  # every process of torchrun finds the same
            print(f"fwzoo: {error.format_message()}", file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        print("fwzoo: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fwzoo {__version__}")
        raise typer.Exit


@app.callback()
def _every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train, run and inspect fast-weight language models."""


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for the model, its card and the loss plot.")] = Path(
        "fwzoo-quickstart"
    ),
    steps: Annotated[int, _number("Training steps at most.", int, 1)] = 900,
    minutes: Annotated[float, _number("Training minutes at most.", float, 0.01, 60)] = 2.5,
    seed: Annotated[int, _number("Seed of the weights and of the order of the text.", int, 0)] = 0,
) -> None:
    """Train a small Falcon-3A on text that ships with Python, compare, save, load and generate: a few minutes."""
    from fwzoo.commands.quickstart import run

    run(out, steps, minutes, seed)


@app.command()
def train(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, the model and the loss curve.")],
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="Text files (a document each) and JSON-lines files (.jsonl, .json), also with .gz."),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="A dataset of the Hugging Face Hub, instead of files.")] = None,
    dataset_split: Annotated[str, typer.Option(help="The split of --dataset.")] = "train",
    text_column: Annotated[str, typer.Option(help="The field of a record that holds the text.")] = "text",
    arch: Annotated[str | None, typer.Option(help="An architecture, see `fwzoo archs` (default: falcon3a).")] = None,
    config: Annotated[str | None, typer.Option(help="A JSON config file, instead of --arch.")] = None,
    hidden_size: Annotated[int | None, _number("Width of the model.", int, 1)] = None,
    layers: Annotated[int | None, _number("Number of layers.", int, 1)] = None,
    heads: Annotated[int | None, _number("Heads a layer; they divide the width.", int, 1)] = None,
    tokenizer: Annotated[str, typer.Option(help="`bytes`, or a folder or Hub name of a tokenizer.")] = "bytes",
    steps: Annotated[int | None, _number("Optimiser steps (default: 1000).", int, 1)] = None,
    epochs: Annotated[float | None, _number("Passes over the text, instead of --steps.", float, above=0)] = None,
    sequence_length: Annotated[int, _number("Tokens a row.", int, 2)] = 512,
    batch_size: Annotated[int, _number("Rows a forward pass.", int, 1)] = 8,
    gradient_accumulation: Annotated[int, _number("Forward passes a step.", int, 1)] = 1,
    lr: Annotated[float, _number("Peak learning rate.", float, above=0)] = 1e-3,
    warmup: Annotated[int | None, _number("Steps up to the peak (default: a tenth, 2000 at most).", int, 0)] = None,
    weight_decay: Annotated[float, _number("AdamW's weight decay, of matrices.", float, 0)] = 0.1,
    seed: Annotated[int, _number("Seed of the weights and of the order of the text.", int, 0)] = 0,
    eval_text: Annotated[list[str] | None, typer.Option(help="A held-out file; may be given again.")] = None,
    eval_fraction: Annotated[float, _number("Hold out this share of the documents, instead.", float, 0, 0.5)] = 0.0,
    eval_rows: Annotated[int, _number("Rows of held-out text at most.", int, 1)] = 1000,
    eval_every: Annotated[
        int | None, _number("Steps between evaluations (default: a tenth of the run).", int, 0)
    ] = None,
    save_every: Annotated[
        int | None, _number("Steps between checkpoints (default: a tenth of the run).", int, 0)
    ] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16; the weights stay float32.")] = False,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Recompute layers in the backward pass to save memory.")
    ] = False,
    report_to: Annotated[
        list[str] | None,
        typer.Option(help="`tensorboard` or `trackio`: send the numbers there too; may be given again."),
    ] = None,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="Under torchrun: shard the model over the processes (FSDP2).")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out; its options need not be repeated.")
    ] = False,
) -> None:
    """Train an architecture on text. Ctrl-C saves a checkpoint from which --resume goes on exactly.

    On several GPUs or machines: torchrun --nproc-per-node 8 -m fwzoo train ...
    """
    from fwzoo.commands.train import run

    run(context)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A folder that training wrote, or a Hub name.")],
    prompt: Annotated[str | None, typer.Option(help="The text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with the text to continue.")] = None,
    max_new_tokens: Annotated[int, _number("Tokens to generate at most (a turn).", int, 1)] = 200,
    temperature: Annotated[float | None, _number("Sampling temperature (default: 0.8).", float, above=0)] = None,
    top_p: Annotated[float | None, _number("Nucleus sampling share (default: 0.95).", float, above=0, high=1)] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token instead of sampling.")] = False,
    seed: Annotated[int | None, _number("Seed of the sampling.", int, 0)] = None,
    save_memory: Annotated[
        Path | None, typer.Option(help="Write the memory (and the text's tokens) to this safetensors file.")
    ] = None,
    load_memory: Annotated[Path | None, typer.Option(help="Go on from a file that --save-memory wrote.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="Start with a memory that `memorize` made: a folder or a Hub name.")
    ] = None,
) -> None:
    """Continue a prompt; without one, piped text, or line by line at a terminal."""
    from fwzoo.commands.generate import run

    run(model, prompt, prompt_file, max_new_tokens, temperature, top_p, greedy, seed, save_memory, load_memory, memory)


@app.command()
def convert(
    layout: Annotated[str, typer.Argument(help="`lact-official`: the public LaCT code's layout.")],
    source: Annotated[Path, typer.Argument(help="The folder of a checkpoint, in that layout or in ours.")],
    target: Annotated[Path, typer.Argument(help="The folder for the other layout.")],
) -> None:
    """Convert a checkpoint from another code's layout to ours, or back."""
    from fwzoo.commands.convert import run

    run(layout, source, target)


@app.command()
def upcycle(
    source: Annotated[str, typer.Argument(help="A folder or Hub name of a Llama, Mistral, Qwen2 or Qwen3 model.")],
    target: Annotated[Path, typer.Argument(help="A new folder for the hybrid.")],
    layout: Annotated[str, typer.Option(help="What every layer becomes: 'fa+lact@4,8' keeps all but layers 4 and 8.")],
    window: Annotated[
        int | None, _number("Tokens that sliding attention and LaCT's attention see (default: 2048).", int, 1)
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, a field of a new layer; may be given again.")
    ] = None,
    seed: Annotated[int, _number("Seed of what is initialised at random.", int, 0)] = 0,
) -> None:
    """Turn a pretrained attention model into a hybrid that begins as the same function."""
    from fwzoo.commands.upcycle import run

    run(source, target, layout, window, set_ or [], seed)


@app.command()
def info(
    model_or_arch: Annotated[str, typer.Argument(help="A model folder, a Hub name or a registered architecture.")],
) -> None:
    """Show layers, parameters, bytes of memory a layer, and which kernels will run and why."""
    from fwzoo.commands.info import info

    info(model_or_arch)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="A folder that training wrote, or a Hub name; it has a memory.")],
    text: Annotated[Path, typer.Option(help="The text that it reads.")],
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("fwzoo-inspect"),
    tokens: Annotated[int, _number("Tokens of the text at most.", int, 1)] = 2048,
) -> None:
    """Report what the memories of a model do with a text: slots, gates, collisions, growth."""
    from fwzoo.commands.inspect import run

    run(model, text, out, tokens)


@app.command()
def capacity(
    key_size: Annotated[int, _number("Size of keys, and of the memories' values.", int, 4, 1024)] = 64,
    pairs: Annotated[int, _number("Stored pairs at most.", int, 64, 100_000_000)] = 2_000_000,
    queries: Annotated[int, _number("Stored keys that are asked for, at least.", int, 1, 4096)] = 256,
    seed: Annotated[int, _number("Seed of keys and values.", int, 0)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for capacity.json and the log-log plot capacity.png.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure how many key-value pairs formulas and the zoo's memories hold: table, plot and JSON, under a minute."""
    from fwzoo.commands.capacity import run

    run(key_size, pairs, queries, seed, out, as_json)


@app.command()
def cost(
    layout: Annotated[str, typer.Argument(help="A layout such as gdn*3,fa; options follow as :FIELD=VALUE.")],
    length: Annotated[
        list[int] | None, _number("Context in tokens; may be given again (default: 4096).", int, 5)
    ] = None,
    layers: Annotated[int, _number("Number of layers.", int, 1)] = 12,
    hidden_size: Annotated[int, _number("Width of the model.", int, 1)] = 768,
    heads: Annotated[int, _number("Heads a layer; they divide the width.", int, 1)] = 12,
    vocab_size: Annotated[int, _number("Number of tokens.", int, 1)] = 32000,
    float32: Annotated[
        bool, typer.Option("--float32", help="Weights and activations of 4 bytes instead of 2.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for cost.json and the plot cost.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show what a layout costs: parameters, FLOPs and bytes moved a token, bytes of state; layer by layer."""
    from fwzoo.commands.cost import run

    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "vocab_size": vocab_size,
    }
    run(layout, length or [4096], sizes, float32, out, as_json)


@app.command()
def compare(
    text: Annotated[
        list[str] | None,
        typer.Argument(help="Text or JSON-lines files (default: text that ships with Python)."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs, compare.json and compare.png.")] = Path(
        "fwzoo-compare"
    ),
    layout: Annotated[
        list[str] | None,
        typer.Option(
            help="A layout, options behind it as :FIELD=VALUE; may be given again (default: softmax, linear and decaying "
            "linear attention, gated delta, Falcon-1A, Falcon-3A). The first one sets the number of parameters."
        ),
    ] = None,
    hidden_size: Annotated[int, _number("Width of the models.", int, 1)] = 64,
    layers: Annotated[int, _number("Number of layers.", int, 1)] = 2,
    heads: Annotated[int, _number("Heads a layer; they divide the width.", int, 1)] = 4,
    steps: Annotated[int, _number("Optimiser steps.", int, 1)] = 600,
    sequence_length: Annotated[int, _number("Tokens a row.", int, 8)] = 256,
    batch_size: Annotated[int, _number("Rows a step.", int, 1)] = 4,
    lr: Annotated[float, _number("Peak learning rate.", float, above=0)] = 4e-3,
    seeds: Annotated[int, _number("Runs of every layout, with seeds 0, 1, ...", int, 1, 100)] = 1,
    context: Annotated[
        list[int] | None, _number("Tokens at which to give bytes of state (default: 512 4096 32768).", int, 5)
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="`bytes`, or a folder or Hub name of a tokenizer.")] = "bytes",
    eval_rows: Annotated[int, _number("Rows of held-out text at most.", int, 1)] = 64,
) -> None:
    """Train several layouts under one budget on a text and compare them. Interrupted, the same command goes on."""
    from fwzoo.commands.compare import run
    from fwzoo.evaluation.compare import DEFAULT

    sizes = {"hidden_size": hidden_size, "layers": layers, "heads": heads}
    budget = (steps, sequence_length, batch_size, lr, seeds)
    contexts = sorted(set(context or [512, 4096, 32768]))
    run(text or [], layout or list(DEFAULT), out, sizes, *budget, contexts, tokenizer, eval_rows)


@app.command()
def selftest(
    op: Annotated[str | None, typer.Option(help="Only this operator, for example falcon.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda where there is one).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare every kernel with its definition on this machine, and say whether it is right."""
    from fwzoo.commands.selftest import run

    raise typer.Exit(run(op, device, json))


@app.command()
def archs() -> None:
    """List the registered architectures."""
    from fwzoo.commands.info import archs

    archs()


Model = Annotated[str, typer.Argument(help="A folder that training wrote, or a Hub name.")]
License = Annotated[str | None, typer.Option(help="The licence of the weights, as the Hub spells it: apache-2.0, ...")]
Language = Annotated[str | None, typer.Option(help="The language of the text, as the Hub spells it: en, ...")]
BaseModel = Annotated[str | None, typer.Option(help="The Hub name of the model that this one was made from.")]


@app.command()
def export(
    model: Model,
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    license: License = None,
    language: Language = None,
    base_model: BaseModel = None,
) -> None:
    """Write a model as a folder that loads without fwzoo: weights, tokenizer, code and card."""
    from fwzoo.commands.hub import export

    export(model, out, license=license, language=language, base_model=base_model)


@app.command()
def memorize(
    model: Model,
    text: Annotated[Path, typer.Option(help="The text to read.")],
    out: Annotated[Path, typer.Option(help="A new folder for the memory.")],
    passes: Annotated[int, _number("How often to read it.", int, 1)] = 1,
    note: Annotated[str | None, typer.Option(help="A sentence on what was read, for the card.")] = None,
) -> None:
    """Read a text and keep what the model remembers of it as a folder that anyone with the model can load."""
    from fwzoo.commands.memorize import run

    run(model, text, passes, out, note)


@app.command()
def serve(
    model: Model,
    memory: Annotated[
        str | None,
        typer.Option(help="Start every conversation with a memory that `memorize` made: a folder or a Hub name."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 lets other machines in.")] = "localhost",
    port: Annotated[int, _number("The port to listen on.", int, 1, 65535)] = 8000,
) -> None:
    """Answer over HTTP as OpenAI's API does: chats and completions, streamed or not."""
    from fwzoo.commands.serve import run

    run(model, memory, host, port)


@app.command()
def push(
    model: Model,
    repository: Annotated[str, typer.Argument(help="USER/NAME on the Hub; created when it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Create it as a private repository.")] = False,
    license: License = None,
    language: Language = None,
    base_model: BaseModel = None,
) -> None:
    """Upload what `export` writes to the Hugging Face Hub."""
    from fwzoo.commands.hub import push

    push(model, repository, private, license=license, language=language, base_model=base_model)


@app.command()
def card(
    model: Model,
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of the terminal.")] = None,
    name: Annotated[str | None, typer.Option(help="The name under which others load it (default: MODEL).")] = None,
    license: License = None,
    language: Language = None,
    base_model: BaseModel = None,
) -> None:
    """Show a model card made from the configuration and the numbers that training measured."""
    from fwzoo.commands.hub import card

    card(model, out, name, license=license, language=language, base_model=base_model)
