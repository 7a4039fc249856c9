"""The page's scripts can be read and reviewed line by line, as the Python can."""

from pathlib import Path

STATIC = Path(__file__).parents[2] / "skyrl_megatron_observe" / "static"
LONGEST = 140


def test_no_line_of_the_scripts_is_too_long():
    scripts = sorted(STATIC.glob("*.js"))
    assert len(scripts) >= 10
    long = {
        f"{path.name}:{number}": len(line)
        for path in scripts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > LONGEST
    }
    assert not long, f"break these lines at {LONGEST} characters, one statement a line"
