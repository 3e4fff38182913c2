"""What pyproject.toml cannot say: a .pth file beside the packages, so that `import mindio_ttp` finds our modules.

The file belongs to the wheel (and to the wheel that an editable install makes), so that pip lists it in RECORD and
removes it again. See mindio_tft_patch/old_names.py, which holds its one line.
"""

from __future__ import annotations

import ast
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

NAME = "mindio_tft_patch_old_names.pth"
SOURCE = Path(__file__).parent / "mindio_tft_patch/old_names.py"


def pth_line() -> str:
    """PTH_LINE of old_names.py, read without importing the package, whose dependencies a build does not have."""
    for node in ast.parse(SOURCE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PTH_LINE":
            return str(ast.literal_eval(node.value))
    raise RuntimeError(f"{SOURCE} has no PTH_LINE")


class BuildWithPth(build_py):
    """build_py that writes the .pth file where the packages go."""

    def run(self) -> None:
        """Build, and write the file."""
        super().run()
        # An editable wheel takes files from where `install` would put them, and not from the build folder.
        folder = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        target = Path(folder) / NAME
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(pth_line() + "\n", encoding="utf-8")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """All files, this one included."""
        outputs = list(super().get_outputs(include_bytecode))
        return outputs if self.editable_mode else [*outputs, str(Path(self.build_lib) / NAME)]


setup(cmdclass={"build_py": BuildWithPth})
