#!/usr/bin/env bash
# Sets up what is missing, then serves a model on a real Triton Server and asks it a sample question.
# scripts/serve.sh --help lists the flags; scripts/setup.sh names the environment variables.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# Wrong flags and taken ports are told before anything long starts.
if [ -x "$venv/bin/python" ]; then python=$venv/bin/python; else find_python; fi
"$python" "$root/scripts/serve_options.py" "$@"
case " $* " in *" --help "* | *" -h "*) exit 0 ;; esac
set_up base
exec "$venv/bin/python" "$root/scripts/serve.py" "$@"
