#!/usr/bin/env bash
# Install the wheel and the sdist on several versions of Python, without torch, and try the command line.
#
#   tests/pythons.sh                         each version of Python in the classifiers
#   tests/pythons.sh 3.13                    these versions
#   TESTS="-m quick" tests/pythons.sh 3.13   then install the extra `test`, torch included, and run these tests
#
# An interpreter is python3.X on the path, or one that pyenv has installed. Which versions were not to be had is said at
# the end; without any, the exit status is 1. Takes about ten seconds a version, and needs a package index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null
export NO_COLOR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH
versions=("$@")
[ $# -gt 0 ] || mapfile -t versions < <(sed -n 's/.*Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml)
work=$(mktemp -d -t pythons.XXXXXX)
trap 'rm -rf "$work"' EXIT

interpreter() {
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

smoke() { # the environment of a version, in which the package is installed
    local bin=$1/bin out=$work/out
    rm -rf "$out" && mkdir "$out"
    "$bin/python" -I tests/without_torch.py
    "$bin/ema-ckpt" --version
    "$bin/ema-ckpt" inspect fixtures/tiny-lm >/dev/null
    "$bin/ema-ckpt" consolidate fixtures/tiny-lm "$out/ema.safetensors"
    "$bin/ema-ckpt" consolidate fixtures/tiny-lm "$out/ema.pt"
    "$bin/ema-ckpt" reshard fixtures/tiny-lm "$out/on-3" --world-size 3
    "$bin/ema-ckpt" verify "$out/on-3" --against fixtures/tiny-lm
    "$bin/ema-ckpt" diff fixtures/tiny-lm --html "$out/diff.html" >/dev/null
}

python3 -m venv "$work/build"
"$work/build/bin/pip" install --quiet build
"$work/build/bin/python" -m build --outdir "$work/dist" . >"$work/build.log" 2>&1 || { tail -20 "$work/build.log"; exit 1; }

missing=()
for version in "${versions[@]}"; do
    python=$(interpreter "$version") || { missing+=("$version"); continue; }
    rm -rf "$work/venv" && "$python" -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet "$work"/dist/*.whl
    for package in "$work"/dist/*; do # the same version twice, so it has to be forced
        printf '\n== %s, %s (%d s)\n' "$("$python" --version)" "${package##*/}" "$SECONDS"
        "$work/venv/bin/pip" install --quiet --force-reinstall --no-deps "$package"
        smoke "$work/venv"
    done
    if [ -n "${TESTS:-}" ]; then
        "$work/venv/bin/pip" install --quiet -c constraints.txt "$(echo "$work"/dist/*.whl)[test]"
        eval "\"$work/venv/bin/python\" -m pytest -q -p no:cacheprovider $TESTS"
    fi
done
printf '\n== done (%d s)\n' "$SECONDS"
[ ${#missing[@]} -eq 0 ] || echo "NOT RUN: no interpreter with venv for Python ${missing[*]}"
[ ${#missing[@]} -lt ${#versions[@]} ]
