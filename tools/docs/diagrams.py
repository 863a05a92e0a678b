"""The diagrams of README and docs, as SVG that reads on light and on dark pages: ``python -m tools.docs.diagrams [--check]``.

Boxes bring their own fill; lines and words outside of boxes are of a grey that stands out from white and from black.
"""

import argparse
import sys
import tomllib
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "images"
GREY = "#7b8794"
# Fill, border, text.
COLORS = {
    "blue": ("#dbe7ff", "#5b7fd1", "#14244a"),
    "green": ("#d9f2e1", "#4f9d6b", "#123320"),
    "amber": ("#fdeccb", "#c08a2e", "#402b05"),
    "grey": ("#e8ebef", "#8a94a0", "#22282f"),
    "violet": ("#ebe2fb", "#8467c4", "#2a1850"),
}


@dataclass(slots=True)
class Drawing:
    """A picture of boxes, arrows and words; all sizes are in pixels."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, color: str, *lines: str) -> None:
        """A box; its first line is bold."""
        fill, border, text = COLORS[color]
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{border}"/>'
        )
        top = y + height / 2 - 8.5 * (len(lines) - 1) + 4.5
        for number, line in enumerate(lines):
            weight = ' font-weight="600"' if number == 0 else ' font-size="12"'
            self.parts.append(
                f'<text x="{x + width / 2:g}" y="{top + 17 * number:g}" fill="{text}"{weight}>{escape(line)}</text>'
            )

    def frame(self, x: float, y: float, width: float, height: float, label: str) -> None:
        """A dashed frame around other things, with its label inside at the top."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="none" stroke="{GREY}" '
            'stroke-dasharray="5 4"/>'
        )
        self.words(x + width / 2, y + 18, label)

    def words(self, x: float, y: float, text: str, *, anchor: str = "middle") -> None:
        """Words outside of boxes."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{GREY}" font-size="12" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float]) -> None:
        """An arrow along some points."""
        path = " ".join(f"{'M' if number == 0 else 'L'}{x:g},{y:g}" for number, (x, y) in enumerate(points))
        self.parts.append(f'<path d="{path}" fill="none" stroke="{GREY}" stroke-width="1.6" marker-end="url(#head)"/>')

    def svg(self) -> str:
        """The file."""
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" font-family="system-ui, -apple-system, \'Segoe UI\', sans-serif" '
            f'font-size="13" text-anchor="middle">\n<title>{escape(self.title)}</title>\n'
            f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker></defs>\n{body}\n</svg>\n'
        )


def overview() -> Drawing:
    """What stagepack is for: one export, many places to run."""
    drawing = Drawing(
        780, 268, "A PyTorch model is exported into a bundle of stages, each of which is loaded on a device"
    )
    drawing.box(8, 96, 128, 62, "blue", "PyTorch model", "module, .pt2, HF")
    drawing.arrow((136, 127), (222, 127))
    drawing.words(179, 117, "export")
    drawing.frame(226, 8, 250, 238, "model.stagepack/ (on disk)")
    drawing.box(240, 38, 222, 34, "amber", "manifest.json")
    for stage in range(3):
        y = 82 + 54 * stage
        drawing.box(240, y, 104, 44, "green", f"stage {stage}", "graph")
        drawing.box(350, y, 112, 44, "green", "weights", "safetensors")
        drawing.arrow((462, y + 22), (560, y + 22))
    drawing.words(518, 96, "load")
    devices = [("GPU host", "torch"), ("GPU host", "torch"), ("CPU host", "ONNX Runtime")]
    for stage, (host, runtime) in enumerate(devices):
        drawing.box(564, 82 + 54 * stage, 128, 44, "violet", host, runtime)
        if stage:
            drawing.arrow((628, 72 + 54 * stage), (628, 82 + 54 * stage))
    drawing.arrow((628, 50), (628, 82))
    drawing.words(628, 42, "request")
    drawing.arrow((692, 212), (716, 212))
    drawing.words(747, 216, "answer")
    drawing.words(628, 258, "no pickle, no model code, only its own bytes")
    return drawing


def road() -> Drawing:
    """The steps from a model to an answer."""
    drawing = Drawing(1010, 300, "The steps from a model to an answer, and the packages that do them")
    for number, source in enumerate(("nn.Module", ".pt2 file", "HF folder")):
        drawing.box(8, 70 + 38 * number, 92, 30, "blue", source)
        drawing.arrow((100, 85 + 38 * number), (138, 123))
    steps = [
        ("capture", "torch.export", "grey"),
        ("linearize", "program to graph", "grey"),
        ("Graph", "pure data", "amber"),
        ("plan", "costs, solver", "green"),
        ("cut", "one graph a stage", "green"),
        ("fold", "equal runs once", "green"),
    ]
    width, gap, left = 122, 20, 142
    for number, (name, text, color) in enumerate(steps):
        x = left + (width + gap) * number
        drawing.box(x, 96, width, 54, color, name, text)
        if number:
            drawing.arrow((x - gap, 123), (x, 123))
    drawing.frame(left - 10, 44, 2 * width + gap + 20, 120, "needs torch")
    plan, last = left + 3 * (width + gap), left + 5 * (width + gap) + width / 2
    drawing.frame(plan - 10, 44, 3 * width + 2 * gap + 20, 120, "needs no torch")
    drawing.arrow((last, 150), (last, 212))
    drawing.words(last + 8, 188, "write", anchor="start")
    drawing.box(824, 216, 160, 60, "amber", "BUNDLE", "graphs, weights, manifest")
    row = [("loader", "checks, reads"), ("pipeline", "torch, ONNX Runtime"), ("server", "REST, gRPC, Triton")]
    for number, (name, text) in enumerate(row):
        x = 634 - 190 * number
        drawing.arrow((824 - 190 * number, 246), (x + 150, 246))
        drawing.box(x, 216, 150, 60, "violet", name, text)
    drawing.arrow((254, 246), (196, 246))
    drawing.words(166, 250, "answers")
    graph = left + 2 * (width + gap) + width / 2
    drawing.arrow((984, 246), (1002, 246), (1002, 24), (graph, 24), (graph, 96))
    drawing.words((graph + 1002) / 2, 16, "recut: join the stages to the whole graph, and cut it again")
    return drawing


def packages() -> Drawing:
    """The layers of stagepack as import-linter keeps them, and the packages that run bundles."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer.split(" | ") for layer in next(c for c in contracts if c["type"] == "layers")["layers"]]
    height = 96 + 58 * len(layers)
    drawing = Drawing(860, height, "The layers of stagepack, and the packages that run and serve bundles")
    drawing.frame(8, 8, 480, height - 44, "stagepack: writes bundles")
    for number, names in enumerate(layers):
        names = [name.strip(" ()") for name in names]
        y, width = 40 + 58 * number, (452 - 10 * (len(names) - 1)) / len(names)
        for position, name in enumerate(names):
            is_of_torch = name in ("capture", "linearize", "onnx", "exporter", "torch_internals")
            color = "grey" if is_of_torch else "amber" if name in ("format", "errors") else "green"
            color = "blue" if name == "cli" else color
            drawing.box(22 + (width + 10) * position, y, width, 38, color, name)
        if number:
            drawing.arrow((248, y - 20), (248, y))
    drawing.frame(560, 8, 290, 228, "loaders: run and serve bundles")
    drawing.box(580, 40, 250, 62, "violet", "stagepack_serving", "protocol, server, triton")
    drawing.arrow((705, 102), (705, 140))
    drawing.box(580, 140, 250, 76, "violet", "stagepack_loaders", "load, pipeline, placement", "torch, onnxruntime")
    lowest = 40 + 58 * (len(layers) - 2) + 19
    drawing.arrow((705, 216), (705, lowest), (476, lowest))
    drawing.words(716, lowest - 40, "format and", anchor="start")
    drawing.words(716, lowest - 24, "errors only", anchor="start")
    drawing.words(248, height - 12, "each layer imports only the layers below it")
    for position, (color, text) in enumerate(
        (("grey", "imports torch"), ("green", "never imports torch"), ("amber", "what both sides share"))
    ):
        fill, border, _ = COLORS[color]
        y = height - 84 + 24 * position
        drawing.parts.append(f'<rect x="580" y="{y}" width="16" height="14" rx="3" fill="{fill}" stroke="{border}"/>')
        drawing.words(604, y + 11, text, anchor="start")
    return drawing


DRAWINGS = {"overview.svg": overview, "road.svg": road, "packages.svg": packages}


def main() -> None:
    """Write the files, or compare them with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is not the current one")
    check = parser.parse_args().check
    for name, draw in DRAWINGS.items():
        path, content = FOLDER / name, draw().svg()
        if check and (not path.exists() or path.read_text() != content):
            sys.exit(
                f"{path.relative_to(ROOT)} is not what tools/docs/diagrams.py draws: run python -m tools.docs.diagrams"
            )
        if not check:
            path.write_text(content)


if __name__ == "__main__":
    main()
