"""The same repository for MODULE.bazel. Bazel 4 has no module extensions and never loads this."""

load(":python_env.bzl", "python_env_repository")

def _python_env_impl(_module_ctx):
    python_env_repository(name = "python_env")

python_env = module_extension(implementation = _python_env_impl)
