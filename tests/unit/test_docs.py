"""What the documents must say: every variable and flag that is read, and links that lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

import pytest

from mindio_tft_patch.config import FEATURE_FLAGS, MASTER_FLAG, read_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAGS = (ROOT / "docs/flags.md").read_text(encoding="utf-8")


class _Curious(Mapping[str, str]):
    """An empty environment that remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _variables() -> list[str]:
    environ = _Curious()
    read_config([], environ)
    return sorted(environ.asked)


def test_the_configuration_asks_for_the_variables_that_we_know_of() -> None:
    assert {"TTP_OT", "TTP_PORT", "TFT_DEVICE", "HIGH_AVAILABILITY", "MINDX_TASK_ID"} <= set(_variables())


@pytest.mark.parametrize("name", _variables())
def test_every_variable_that_is_read_has_a_row_in_flags_md(name: str) -> None:
    assert re.search(rf"^\|[^|]*`{name}`[^|]*\|.*\|.*\|", FLAGS, re.MULTILINE), f"{name} has no row in docs/flags.md"


@pytest.mark.parametrize("flag", [MASTER_FLAG, *FEATURE_FLAGS])
def test_every_flag_has_a_row_in_flags_md(flag: str) -> None:
    assert re.search(rf"^\| `{flag}` \|", FLAGS, re.MULTILINE), f"{flag} has no row in docs/flags.md"


def test_no_variable_in_flags_md_is_unknown() -> None:
    documented = set(re.findall(r"`((?:TTP|TFT|MINDIO|MINDX)_[A-Z_]+)`", FLAGS))
    assert documented <= set(_variables())


def _default_rows() -> dict[str, str]:
    rows = re.findall(r"^\| `([A-Z_]+)` \| .* \| (.*?) \| (.*?) \|$", FLAGS, re.MULTILINE)
    return {name: default for name, _, default in rows}


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        ("TTP_PORT", "port"),
        ("TTP_RETRY_TIMES", "retry_times"),
        ("TTP_OT", "dump_timeout_seconds"),
        ("TTP_NORMAL_ACTION_TIME_LIMIT", "phase_timeout_seconds"),
        ("MINDIO_WAIT_MINDX_TIME", "cluster_manager_wait_seconds"),
        ("TFT_HEARTBEAT_SECONDS", "heartbeat_seconds"),
        ("TFT_HEARTBEATS_MISSED", "heartbeats_missed"),
        ("TFT_HANG_SECONDS", "hang_seconds"),
        ("TFT_COLLECT_SECONDS", "collect_seconds"),
        ("TFT_REPLICAS", "replicas"),
        ("TFT_RESTART_BUDGET", "restart_budget"),
        ("TFT_RETURN_SECONDS", "return_seconds"),
        ("TFT_SCRUB_INTERVAL", "scrub_interval"),
        ("TFT_SCRUB_ACTION", "scrub_action"),
        ("TFT_DEVICE", "device"),
        ("TTP_LOG_LEVEL", "log_level"),
        ("TTP_LOG_PATH", "log_path"),
    ],
)
def test_defaults_in_flags_md_are_those_of_the_code(name: str, attribute: str) -> None:
    value = getattr(read_config([], {}), attribute)
    assert _default_rows()[name] == (f"{value:g}" if isinstance(value, (int, float)) else str(value))


@pytest.mark.parametrize(
    ("name", "low", "high"), re.findall(r"^\| `([A-Z_]+)` \| .* \| ([\d.]+) to ([\d.]+) \|", FLAGS, re.MULTILINE)
)
def test_ranges_in_flags_md_are_those_of_the_code(name: str, low: str, high: str) -> None:
    for good in (low, high):
        assert not read_config([], {name: good}).warnings, f"{name}={good} is refused"
    beyond = (f"{float(low) - 0.01:g}" if "." in low else str(int(low) - 1), str(int(float(high)) + 1))
    for bad in beyond:
        assert read_config([], {name: bad}).warnings, f"{name}={bad} is accepted"


def _anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = (document.parent / name) if name else document
        assert target.exists(), f"{document.name}: {link} leads nowhere"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(_anchor, headings), f"{document.name}: {link}: no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_documents_name_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:adaptors|launch|tests|docs|mindio_tft_patch)/[\w/.]*)`", text):
        assert (ROOT / name).exists(), f"{document.name} names {name}"
    for name in re.findall(r"`((?:protocol|processor|controller)/[\w/.]*)`", text):
        assert (ROOT / "mindio_tft_patch" / name).exists(), f"{document.name} names {name}"


def _said() -> list[str]:
    """Every text in the shipped code, with "..." where a value is put in."""
    texts = []
    for folder in ("mindio_tft_patch", "adaptors", "launch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                    texts.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(re.sub(r"%[.\w]+", "...", node.value))
    return texts


def _messages() -> list[str]:
    table = (ROOT / "docs/operating.md").read_text(encoding="utf-8").split("## Troubleshooting by message")[1]
    return re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)


def test_every_message_in_the_table_of_troubles_is_one_that_the_code_says() -> None:
    said = _said()
    patterns = {message: ".*".join(map(re.escape, message.split("..."))) for message in _messages()}
    unknown = [message for message, pattern in patterns.items() if not any(re.search(pattern, text) for text in said)]
    assert _messages() and not unknown
