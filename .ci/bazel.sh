#!/usr/bin/env bash
# Builds and tests every Bazel target with the Bazel that Debian packages (4.2.3, offline).
#
#   .ci/bazel.sh [PYTHON]     PYTHON (default python3) has jax, jaxlib, nanobind and pytest installed
#
# Exits 0 without a build only where Bazel cannot be installed; a build that fails, fails.
set -euo pipefail
python="$(command -v "${1:-python3}")" || {
  echo "got PYTHON=${1:-python3}; expected an interpreter with jax, jaxlib, nanobind and pytest"
  exit 1
}
# Resolves a relative folder, but not the last link: that one is what makes a venv a venv.
JAX_MEGAMOE_PYTHON="$(cd "$(dirname "$python")" && pwd)/$(basename "$python")"
export JAX_MEGAMOE_PYTHON
cd "$(dirname "${BASH_SOURCE[0]}")/.."

skip() {
  echo "Bazel build skipped: $1"
  exit 0
}

# WORKSPACE names the directories of the other three packages.
packages=(bazel-bootstrap bazel-rules-java bazel-rules-proto bazel-platforms)
if ! command -v bazel >/dev/null || [[ ! -d /usr/share/bazel/rules/proto ]]; then
  command -v apt-get >/dev/null || skip "no bazel and no apt-get"
  [[ "$(id -u)" == 0 ]] || skip "no bazel, and apt-get needs root"
  log="$(mktemp)"
  export DEBIAN_FRONTEND=noninteractive
  if ! { apt-get update && apt-get install -y --no-install-recommends "${packages[@]}" g++; } \
    >"$log" 2>&1; then
    tail -n 5 "$log"
    skip "apt-get could not install ${packages[*]}"
  fi
  rm -f "$log"
fi

# An own output root keeps this build away from a user's, and the server ends with the script.
startup=("--output_user_root=${TMPDIR:-/tmp}/jax_megamoe_bazel_$(id -u)" --max_idle_secs=60)
# No bazel-* links in the source tree; Debian's bazelrc turns sandbox_debug on, which prints pages.
flags=(--jobs="$(nproc)" --noshow_progress --color=no --symlink_prefix=/ --nosandbox_debug)
trap 'bazel "${startup[@]}" shutdown >/dev/null 2>&1 || true' EXIT

# Debian's package reports no version of its own, dpkg does.
echo "Bazel $(dpkg-query -W -f '${Version}' bazel-bootstrap 2>/dev/null || bazel --version)," \
  "$("${CXX:-g++}" --version | head -n 1), $("$JAX_MEGAMOE_PYTHON" --version)"
bazel "${startup[@]}" build "${flags[@]}" //...
bazel "${startup[@]}" test "${flags[@]}" //...

echo "Bazel built and tested:"
bazel "${startup[@]}" query --noshow_progress --output=label_kind //... | sort
ls -l "$(bazel "${startup[@]}" info bazel-bin)/jax_megamoe/_native.so"
