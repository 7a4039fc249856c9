"""Seeing a run: checks and estimates before it, recorders during it, reports and comparisons after it."""

from skyrl_megatron.plugins import RECORDERS, SINKS, TRACKERS, register_run_file

# The curves are drawn before the last report, which is written when everything else is.
for _recorder in (
    "hang:HangRecorder",
    "dump:BatchRecorder",
    "estimate.step_report:EstimateRecorder",
    "curves:CurvesRecorder",
    "observe:ReportRecorder",
):
    RECORDERS.register_path(f"{__name__}.{_recorder}")
for _sinks in ("trackers:run_sinks", "exporters:prometheus"):
    SINKS.register_path(f"{__name__}.{_sinks}")
for _tracker in ("wandb", "mlflow", "swanlab"):
    TRACKERS.register_path(_tracker, f"{__name__}.trackers:start_{_tracker}")
register_run_file("curves", "curves.png")
register_run_file("report", "report.html")
