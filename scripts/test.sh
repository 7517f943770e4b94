#!/usr/bin/env bash
# Sets up what the checks need and runs them: formatting, lint, types, then the tests.
#   scripts/test.sh [PYTEST ARGUMENTS]     with arguments only pytest runs, with those
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up dev
cd "$root"

# Engine and server share the cores of the machine in the tests; more threads than that only wait for one another.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
status=0
if [ $# -eq 0 ]; then
    "$venv/bin/ruff" format --check . || status=1
    "$venv/bin/ruff" check . || status=1
    "$venv/bin/mypy" || status=1
fi
# pytest comes last, so that its summary is the last line.
"$venv/bin/python" -m pytest "$@" || status=$?
exit "$status"
