# Shared by run, test and check: makes an environment once and installs the wanted extra into it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

ensure_venv() {  # ensure_venv EXTRA [FOLDER]
  local venv="${2:-.venv}"
  local stamp="$venv/.installed-$1"
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ constraints.txt -nt "$stamp" ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$1]" >&2 || return
    touch "$stamp"
  fi
}
