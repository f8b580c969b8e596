"""Option names and defaults of every command are a promise: golden_options.json lists them, and no release drops one.

The file holds, for each command, what `diversed COMMAND --print_config` prints: every option by its dotted name, with
its default. A new option is added to the file by `python tests/test_golden_options.py`, which keeps all older lines.
"""

import json
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml
from diversed import cli

GOLDEN = Path(__file__).with_name("golden_options.json")
PROMISED = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
# What a command cannot do without, so that it answers `--print_config`.
NEEDED = {
    "gather": {"out": "o"},
    "train": {"data.traces": "t", "out": "o"},
    "select": {"out": "o", "latencies": "gpu"},
    "distill": {"out": "o"},
    "export": {"train": "t", "out": "o"},
    "eval": {"out": "o"},
    "calibrate": {"bundle": "b", "max_quality_drop": 0.01},
    "report": {"runs": ["r"]},
    "bench vllm": {"bundle": "b"},
}


def commands():
    """Every command, each benchmark as one of its own."""
    from diversed.commands.bench import names

    return [name for name in cli.COMMANDS if name != "bench"] + [f"bench {name}" for name in names()]


def words(options):
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in options.items()]


def printed(command, *given):
    """Options and values as `--print_config` prints them, by dotted name."""
    with redirect_stdout(StringIO()) as answer:
        try:
            code = cli.main([*command.split(), *words(NEEDED.get(command, {})), *given, "--print_config"])
        except SystemExit as stop:
            code = stop.code
    assert code == 0, f"diversed {command} --print_config ends with {code}"
    return flat(yaml.safe_load(answer.getvalue()))


def flat(values, prefix=""):
    found = {}
    for name, value in values.items():
        inside = isinstance(value, dict) and value
        found |= flat(value, f"{prefix}{name}.") if inside else {f"{prefix}{name}": value}
    return found


def test_every_command_is_in_the_list():
    assert [name for name in commands() if name not in PROMISED] == []
    assert [name for name in PROMISED if name.split()[0] not in cli.COMMANDS] == []


@pytest.mark.parametrize("command", PROMISED)
def test_every_option_keeps_its_name_and_its_default(command):
    promised, found = PROMISED[command], printed(command)
    assert {name: found.get(name) for name in promised if name in found} == {
        name: default for name, default in promised.items() if name in found
    }
    # `run` prints no nulls, and an option of a mapping is printed when it is given: these can still be written.
    unseen = {name: default for name, default in promised.items() if name not in found}
    printed(command, *words(unseen))


@pytest.mark.parametrize("command", [name for name in commands() if name != "run"])
def test_every_option_has_its_help(command, capsys):
    """One that has none is printed as its type and default alone."""
    with pytest.raises(SystemExit):
        cli.main([*command.split(), *(["r"] if command == "report" else []), "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert re.findall(r"--([\w.]+) \S+ \((?:required, )?type: ", text) == []


if __name__ == "__main__":
    now = {command: printed(command) | PROMISED.get(command, {}) for command in commands()}
    for stage in ("gather", "train", "export", "eval"):
        nulls = {f"{stage}.{name}": None for name, default in now[stage].items() if default is None}
        now["run"] |= {name: None for name in nulls if name != "export.results"}
    GOLDEN.write_text(json.dumps(PROMISED | now, indent=1, ensure_ascii=False) + "\n")
