"""The diagrams of README and docs, as SVG that reads on light and on dark pages: ``python -m tools.docs.diagrams [--check]``.

Boxes bring their own fill; lines and words outside of boxes are of a grey that stands out from white and from black.
"""

import argparse
import re
import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from tools.docs.import_contracts import import_contracts

ROOT = Path(__file__).parents[2]
IMAGE_FOLDER = ROOT / "docs" / "images"
LINE_COLOR = "#7b8794"
# Fill, border, text.
BOX_COLORS = {
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

    def box(self, x: float, y: float, width: float, height: float, color_name: str, *text_lines: str) -> None:
        """A box; its first line is bold."""
        fill_color, border_color, text_color = BOX_COLORS[color_name]
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill_color}" stroke="{border_color}"/>'
        )
        first_baseline = y + height / 2 - 8.5 * (len(text_lines) - 1) + 4.5
        for line_index, text_line in enumerate(text_lines):
            font_style = ' font-weight="600"' if line_index == 0 else ' font-size="12"'
            baseline = first_baseline + 17 * line_index
            self.parts.append(
                f'<text x="{x + width / 2:g}" y="{baseline:g}" fill="{text_color}"{font_style}>{escape(text_line)}</text>'
            )

    def frame(self, x: float, y: float, width: float, height: float, label: str) -> None:
        """A dashed frame around other things, with its label inside at the top."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="none" stroke="{LINE_COLOR}" '
            'stroke-dasharray="5 4"/>'
        )
        self.words(x + width / 2, y + 18, label)

    def words(self, x: float, y: float, words_text: str, *, anchor: str = "middle") -> None:
        """Words outside of boxes."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{LINE_COLOR}" font-size="12" text-anchor="{anchor}">{escape(words_text)}</text>'
        )

    def arrow(self, *points: tuple[float, float], is_dashed: bool = False) -> None:
        """An arrow along some points."""
        path_data = " ".join(
            f"{'M' if point_index == 0 else 'L'}{x:g},{y:g}" for point_index, (x, y) in enumerate(points)
        )
        dash_style = ' stroke-dasharray="4 3"' if is_dashed else ""
        self.parts.append(
            f'<path d="{path_data}" fill="none" stroke="{LINE_COLOR}" stroke-width="1.6"{dash_style} marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """The file."""
        svg_body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" font-family="system-ui, -apple-system, \'Segoe UI\', sans-serif" '
            f'font-size="13" text-anchor="middle">\n<title>{escape(self.title)}</title>\n'
            f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{LINE_COLOR}"/></marker></defs>\n{svg_body}\n</svg>\n'
        )


def overview_drawing() -> Drawing:
    """What stagepack is for: one export, many places to run."""
    drawing = Drawing(
        780, 268, "A PyTorch model is exported into a bundle of stages, each of which is loaded on a device"
    )
    drawing.box(8, 96, 128, 62, "blue", "PyTorch model", "module, .pt2, HF")
    drawing.arrow((136, 127), (222, 127))
    drawing.words(179, 117, "export")
    drawing.frame(226, 8, 250, 238, "model.stagepack/ (on disk)")
    drawing.box(240, 38, 222, 34, "amber", "manifest.json")
    for stage_number in range(3):
        stage_top = 82 + 54 * stage_number
        drawing.box(240, stage_top, 104, 44, "green", f"stage {stage_number}", "graph")
        drawing.box(350, stage_top, 112, 44, "green", "weights", "safetensors")
        drawing.arrow((462, stage_top + 22), (560, stage_top + 22))
    drawing.words(518, 96, "load")
    device_names = [("GPU host", "torch"), ("GPU host", "torch"), ("CPU host", "ONNX Runtime")]
    for stage_number, (host_name, runtime_name) in enumerate(device_names):
        drawing.box(564, 82 + 54 * stage_number, 128, 44, "violet", host_name, runtime_name)
        if stage_number:
            drawing.arrow((628, 72 + 54 * stage_number), (628, 82 + 54 * stage_number))
    drawing.arrow((628, 50), (628, 82))
    drawing.words(628, 42, "request")
    drawing.arrow((692, 212), (716, 212))
    drawing.words(747, 216, "answer")
    drawing.words(628, 258, "no pickle, no model code, only its own bytes")
    return drawing


def road_drawing() -> Drawing:
    """The steps from a model to an answer."""
    drawing = Drawing(1010, 300, "The steps from a model to an answer, and the packages that do them")
    for step_index, source_name in enumerate(("nn.Module", ".pt2 file", "HF folder")):
        drawing.box(8, 70 + 38 * step_index, 92, 30, "blue", source_name)
        drawing.arrow((100, 85 + 38 * step_index), (138, 123))
    road_steps = [
        ("capture", "torch.export", "grey"),
        ("linearize", "program to graph", "grey"),
        ("Graph", "pure data", "amber"),
        ("plan", "costs, solver", "green"),
        ("cut", "one graph a stage", "green"),
        ("fold", "equal runs once", "green"),
    ]
    box_width, box_gap, left_edge = 122, 20, 142
    for step_index, (step_name, step_text, color_name) in enumerate(road_steps):
        step_left = left_edge + (box_width + box_gap) * step_index
        drawing.box(step_left, 96, box_width, 54, color_name, step_name, step_text)
        if step_index:
            drawing.arrow((step_left - box_gap, 123), (step_left, 123))
    drawing.frame(left_edge - 10, 44, 2 * box_width + box_gap + 20, 120, "needs torch")
    plan_left, fold_center = (
        left_edge + 3 * (box_width + box_gap),
        left_edge + 5 * (box_width + box_gap) + box_width / 2,
    )
    drawing.frame(plan_left - 10, 44, 3 * box_width + 2 * box_gap + 20, 120, "needs no torch")
    drawing.arrow((fold_center, 150), (fold_center, 212))
    drawing.words(fold_center + 8, 188, "write", anchor="start")
    drawing.box(824, 216, 160, 60, "amber", "BUNDLE", "manifest, graphs,", "weights")
    running_steps = [("loader", "checks, reads"), ("pipeline", "torch, ONNX Runtime"), ("server", "REST, gRPC, Triton")]
    for step_index, (step_name, step_text) in enumerate(running_steps):
        step_left = 634 - 190 * step_index
        drawing.arrow((824 - 190 * step_index, 246), (step_left + 150, 246))
        drawing.box(step_left, 216, 150, 60, "violet", step_name, step_text)
    drawing.arrow((254, 246), (196, 246))
    drawing.words(166, 250, "answers")
    graph_center = left_edge + 2 * (box_width + box_gap) + box_width / 2
    drawing.arrow((984, 246), (1002, 246), (1002, 24), (graph_center, 24), (graph_center, 96))
    drawing.words((graph_center + 1002) / 2, 16, "recut: join the stages to the whole graph, and cut it again")
    return drawing


BAND_TITLES = (
    "the command",
    "extensions: they register themselves, and nothing below imports them",
    "the server, and the roads: each makes or changes a bundle, from top to bottom",
    "what runs bundles, and what makes a graph of a model: they know nothing of each other",
    "the core: what a bundle is, how it is opened and cut",
)


def package_drawing() -> Drawing:
    """The bands of the arrow contract; a package imports only its own band and those below."""
    contracts = import_contracts()
    (bands,) = (contract["layers"] for contract in contracts if contract["name"].startswith("one arrow"))
    torch_free = {*contracts[1]["source_modules"], "stagepack_serving"}
    rows_of_band = [_rows(re.split(" [:|] ", band)) for band in bands]
    drawing = Drawing(860, 60 + sum(54 + 46 * len(rows) for rows in rows_of_band), "The packages in five bands")
    top = 8
    for title, rows in zip(BAND_TITLES, rows_of_band, strict=True):
        height = 34 + 46 * len(rows)
        drawing.frame(8, top, 844, height, title)
        for row_index, names in enumerate(rows):
            width = (824 - 10 * (len(names) - 1)) / len(names)
            for box_index, name in enumerate(names):
                color_name = "green" if name in torch_free else "violet" if name == "stagepack_loaders" else "grey"
                box = (18 + (width + 10) * box_index, top + 28 + 46 * row_index, width, 36)
                drawing.box(*box, color_name, name.removeprefix("stagepack."))
        top += height + 20
        drawing.arrow((430, top - 20), (430, top))
    drawing.parts.pop()  # nothing is below the core
    for box_index, (color_name, text) in enumerate(
        {"green": "needs no torch", "violet": "torch only to run a stage in torch", "grey": "needs torch"}.items()
    ):
        fill_color, border_color, _ = BOX_COLORS[color_name]
        left = 120 + 220 * box_index
        drawing.parts.append(
            f'<rect x="{left}" y="{top}" width="16" height="14" rx="3" fill="{fill_color}" stroke="{border_color}"/>'
        )
        drawing.words(left + 24, top + 11, text, anchor="start")
    return drawing


def _rows(names: list[str]) -> list[list[str]]:
    """Names in rows of at most five."""
    return [names[start : start + 5] for start in range(0, len(names), 5)]


DRAWING_BY_FILE = {"overview.svg": overview_drawing, "road.svg": road_drawing, "packages.svg": package_drawing}


def main() -> None:
    """Write the files, or compare them with what would be written."""
    argument_parser = argparse.ArgumentParser(description=__doc__)
    argument_parser.add_argument(
        "--check", action="store_true", help="write nothing; fail when a file is not the current one"
    )
    is_check = argument_parser.parse_args().check
    for file_name, draw_picture in DRAWING_BY_FILE.items():
        file_path, svg_content = IMAGE_FOLDER / file_name, draw_picture().svg()
        if is_check and (not file_path.exists() or file_path.read_text() != svg_content):
            sys.exit(
                f"{file_path.relative_to(ROOT)} is not what tools/docs/diagrams.py draws: run python -m tools.docs.diagrams"
            )
        if not is_check:
            file_path.write_text(svg_content)


if __name__ == "__main__":
    main()
