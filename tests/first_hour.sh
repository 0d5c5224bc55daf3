#!/usr/bin/env bash
# The first hour of a newcomer, in a fresh environment, from a built wheel: the README's commands as they stand there,
# a training run that is killed and goes on with another number of ranks, and its average in other programs.
#
#     tests/first_hour.sh [DIRECTORY]
#
# Needs a package index. Prints how long each part took. With DIRECTORY the environments in it are used again;
# WITH_TRANSFORMERS=1 installs transformers for the last part.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in -*) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;; esac
work=${1:-$(mktemp -d -t first-hour.XXXXXX)}
mkdir -p "$work"
cd "$work"
[ $# -gt 0 ] || trap 'rm -rf "$work"' EXIT
export NO_COLOR=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
unset PYTHONPATH
python=${PYTHON:-python3}

# What follows is a part of its own; at the end, how long each took.
parts=() began=0
part() {
    [ $began -eq 0 ] || parts+=("$((SECONDS - began + 1)) $name")
    name=$1 began=$((SECONDS + 1))
    printf '\n== %s\n' "$1"
}
fail() { echo "first hour: $1" >&2; exit 1; }

part "a wheel"
rm -rf wheel && "$python" -m pip wheel --quiet --no-deps --wheel-dir wheel "$repo"
wheel=$(ls wheel/*.whl)

part "installed without torch"
[ -d plain ] || "$python" -m venv plain
plain/bin/pip install --quiet "$wheel"
[ $# -eq 0 ] || plain/bin/pip install --quiet --force-reinstall --no-deps "$wheel" # of the same version, maybe older
plain/bin/python -I "$repo/tests/without_torch.py"

part "the README's commands"
ln -sfn "$repo/fixtures" fixtures
rm -rf hf-model
"$python" - "$repo/README.md" >commands.sh <<'PYTHON'
import pathlib, re, sys
text = pathlib.Path(sys.argv[1]).read_text()
block = re.search(r"^```console\n(.*?)^```", text, re.M | re.S)[1]
print(*re.findall(r"^\$ (.*)", block, re.M), sep="\n")
PYTHON
(PATH="$work/plain/bin:$PATH" && set -x && . ./commands.sh)

part "installed with torch"
[ -d train ] || "$python" -m venv train
train/bin/pip install --quiet -c "$repo/constraints.txt" "${wheel}[train]"
[ $# -eq 0 ] || train/bin/pip install --quiet --force-reinstall --no-deps "$wheel"
PATH="$work/train/bin:$PATH"

part "trained on 2 ranks, and killed"
rm -rf run average.safetensors
example=$repo/docs/examples/train_resume.py
set -m # a process group of its own, so that all ranks are killed at once
torchrun --nproc-per-node 2 "$example" train run --steps 100000 >first.log 2>&1 &
set +m
for _ in $(seq 600); do
    grep -q "saved step_20" first.log && break
    sleep 0.2
done
grep -q "saved step_20" first.log || { cat first.log >&2; fail "no checkpoint within two minutes"; }
kill -KILL -- "-$!"
wait "$!" 2>/dev/null || true
last=$(ls run | grep -o '[0-9]*' | sort -n | tail -1)

part "resumed on 3 ranks"
torchrun --nproc-per-node 3 "$example" train run --steps $((last + 20)) | tee second.log
grep -q "written by 2 ranks, on 3" second.log || fail "it did not go on where it stopped"

part "exported and loaded"
ema-ckpt verify run
ema-ckpt consolidate run average.safetensors
told=$(grep -o 'average [0-9.]*' second.log) loaded=$(python "$example" evaluate average.safetensors)
echo "in training: $told; from the file: $loaded"
[ "$told" = "$loaded" ] || fail "the average in the file is another one"

if [ -n "${WITH_TRANSFORMERS:-}" ]; then
    part "installed transformers"
    pip install --quiet -c "$repo/constraints.txt" transformers
fi
part "loaded by transformers"
if python -c 'import transformers' 2>/dev/null; then
    rm -rf lm && ema-ckpt consolidate fixtures/tiny-lm lm && cp fixtures/tiny-lm-config/* lm/
    python - <<'PYTHON'
import torch
from transformers import AutoModelForCausalLM
model, told = AutoModelForCausalLM.from_pretrained("lm", output_loading_info=True)
assert not told["missing_keys"] and not told["unexpected_keys"], told
print("loaded,", sum(p.numel() for p in model.parameters()), "parameters;", model(torch.tensor([[1, 2]])).logits.shape)
PYTHON
else
    echo "transformers is not installed; WITH_TRANSFORMERS=1 installs it"
fi

part "done"
for entry in "${parts[@]}"; do printf '%4d s  %s\n' "${entry%% *}" "${entry#* }"; done
without_torch=$SECONDS
for entry in "${parts[@]}"; do
    case $entry in *"installed with torch") without_torch=$((without_torch - ${entry%% *})) ;; esac
done
echo "$SECONDS s in all, $without_torch s without the installation of torch; the goal is 180 s"
