"""export: a model as a file that runs without this library."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import TokenGroups, TrustRemoteCode, put_beside, quiet_libraries, short, show_summary

if TYPE_CHECKING:
    from tokenformer.exporting import Exported

commands = typer.Typer()


@commands.command("export", epilog="Example: tokenformer export models/mine exported/mine --to onnx")
def export_command(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="The model folder, or a name on the Hub.")],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    to: Annotated[str, typer.Option(help="onnx, for ONNX Runtime; aoti, compiled for torch.")] = "onnx",
    int8: Annotated[bool, typer.Option("--int8", help="With onnx: weights of 8 bits.")] = False,
    device: Annotated[str, typer.Option(help="What aoti compiles for, for example cuda.")] = "cpu",
    tokens: TokenGroups = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Export a model as a file for another runtime, compare the two, and write a script that runs it beside it.

    OUT gets the file, config.json, the tokenizer or image processor, and a README with the script. If the file does not
    compute what the model computes, nothing is written. Token groups that are on become part of it. A language model
    becomes one function for prompts and for decoding with a cache.

    The checkpoints of the paper's authors are written by export-official.
    """
    from tokenformer.exporting import export_folder

    quiet_libraries()
    exported = export_folder(
        source,
        folder,
        to,
        int8=int8,
        device=device,
        trust_remote_code=trust_remote_code,
        prepare=lambda model: put_beside(model, tokens),
    )
    show_summary("Exported", _rows(exported))


def _rows(exported: "Exported") -> dict[str, str]:
    rows = {
        "written": str(exported.folder),
        "files": ", ".join(exported.files),
        "size": f"{short(exported.size, 'B')}, computes in {str(exported.dtype).removeprefix('torch.')}",
        "difference": f"{exported.difference:.1e} of the largest entry"
        if exported.difference is not None
        else 'not compared: onnxruntime is not installed; pip install "tokenformer[export]"',
    }
    if exported.int8 is not None:
        rows["in 8 bits"] = f"{exported.int8:.1e} of the largest entry"
    return rows
