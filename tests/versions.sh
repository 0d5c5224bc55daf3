#!/usr/bin/env bash
# Run the training side's tests on several releases of torch, and print a table.
#
#   tests/versions.sh 2.9.1 2.14.1        these releases; without any, those of the table in the docs
#   TESTS="tests/ema" tests/versions.sh   other tests
#
# What a release writes becomes a fixture by `python fixtures/make.py releases` in its environment, which
# KEEP=1 leaves in place. Each release gets an environment of its own in the temporary directory, one at a time, which is
# removed after its tests otherwise: a build with CUDA takes 5 to 7 GB. CPU builds serve as well.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null
read -ra releases <<<"${*:-2.9.1 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0}"
read -ra tests <<<"${TESTS:-tests/ema tests/resume tests/distributed tests/comm}"
logs=$(mktemp -d "${TMPDIR:-/tmp}/torch-versions.XXXXXX")
echo "logs in $logs" >&2

run_release() {
    local release=$1 log=$logs/$1.log venv=$logs/venv-$1
    python3 -m venv "$venv" &&
        "$venv/bin/pip" install --quiet "torch==$release" -e . pytest hypothesis numpy >"$log" 2>&1 ||
        { echo "| $release | not installed, see $log | | |"; return; }
    "$venv/bin/python" -m pytest -q -p no:cacheprovider -W "ignore::UserWarning" "${tests[@]}" >>"$log" 2>&1
    local summary python
    summary=$(tail -n 1 "$log")
    python=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "| $release | $python | $summary | $(grep -c '^FAILED\|^ERROR' "$log") |"
    grep '^FAILED\|^ERROR' "$log" >&2
    [ -n "${KEEP:-}" ] || rm -rf "$venv"
}

echo "| torch | Python | tests | failed |"
echo "|---|---|---|---|"
for release in "${releases[@]}"; do run_release "$release"; done
