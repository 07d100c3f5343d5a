# Shared by run, test and check: makes an environment once and installs the wanted extra into it, by the versions of
# constraints.txt. PYTHON=python3.12 makes it with that one; TORCH='2.6.*' takes such a PyTorch, and the newest of all else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
unset PYTHONDONTWRITEBYTECODE  # or each of the many processes that tests start compiles the whole library anew

ensure_venv() {  # ensure_venv EXTRA [FOLDER]
  local venv="${2:-.venv}"
  local stamp="$venv/.installed-$1${TORCH:+-torch-$TORCH}" versions=(-c constraints.txt)
  [ -z "${TORCH:-}" ] || versions=("torch==$TORCH")
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ constraints.txt -nt "$stamp" ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${versions[@]}" -e ".[$1]" >&2 || return
    touch "$stamp"
  fi
}
