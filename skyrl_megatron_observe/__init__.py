"""Seeing a run: checks and estimates before it, recorders during it, reports and comparisons after it."""

from skyrl_megatron.plugins import CHECKS, DETAILS, RECORDERS, REPORTERS, SINKS, TRACKERS, register_run_file

# The order is that of the list of problems: what the user wrote, then models and data, then the machine.
for _check in (
    "option_checks:features",
    "option_checks:foreign_options",
    "foreign_values:foreign_values",
    "option_checks:packages",
    "model_checks:model_files",
    "data_checks:vocabularies",
    "model_checks:engine_weights",
    "data_checks:data",
    "machine_checks:folders",
    "room_checks:shared_folders",
    "machine_checks:resume",
    "machine_checks:replay",
    "machine_checks:ports",
    "machine_checks:machine",
    "machine_checks:attention",
    "machine_checks:memory",
    "room_checks:room",
):
    CHECKS.register_path(f"skyrl_megatron_observe.preflight.{_check}")
REPORTERS.register_path("skyrl_megatron_observe.preflight.check_report:report")
DETAILS.register_path("skyrl_megatron_observe.preflight.check_report:details")

# The curves are drawn before the last report, which is written when everything else is.
for _recorder in (
    "memory_forecast:MemoryRecorder",
    "stragglers:StragglerRecorder",
    "hang:HangRecorder",
    "dump:BatchRecorder",
    "estimate.step_report:EstimateRecorder",
    "curves:CurvesRecorder",
    "report_recorder:ReportRecorder",
):
    RECORDERS.register_path(f"skyrl_megatron_observe.{_recorder}")
for _sinks in ("trackers:run_sinks", "exporters:prometheus"):
    SINKS.register_path(f"skyrl_megatron_observe.{_sinks}")
for _tracker in ("wandb", "mlflow", "swanlab"):
    TRACKERS.register_path(_tracker, f"skyrl_megatron_observe.trackers:start_{_tracker}")
register_run_file("curves", "curves.png")
register_run_file("report", "report.html")
