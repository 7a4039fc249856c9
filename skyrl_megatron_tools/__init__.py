"""Commands around a run: doctor, replay, mismatch, clusters, engines on other hosts, the embedded run.

Registers what a run uses of them by path, so that an import of this package loads none of them.
"""

from skyrl_megatron.plugins import ENGINE_SERVICES, REMOTE_ENGINES, TEACHERS

for scheme in ("http", "https"):
    REMOTE_ENGINES.register_path(scheme, "skyrl_megatron_tools.remote.remote_engine:RemoteEngine")
    TEACHERS.register_path(scheme, "skyrl_megatron_tools.remote.remote_teacher:RemoteTeacher")
ENGINE_SERVICES.register_path("enable_registry", "skyrl_megatron_tools.remote.registry:EngineRegistry")
