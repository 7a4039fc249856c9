"""``python -m skyrl_megatron.trainer.dashboard RUN``: write ``report.html`` into a run's folder, as the run does."""

import sys
from pathlib import Path

from skyrl_megatron.errors import SkyRLMegatronError
from skyrl_megatron.trainer.dashboard.page import write_page
from skyrl_megatron.trainer.dashboard.reading import RunReader

if __name__ == "__main__":
    try:
        run = RunReader(Path(sys.argv[1]))
        run.refresh()
        write_page([run], run.folder / "report.html")
    except (SkyRLMegatronError, OSError) as error:
        sys.exit(str(error))
