# shellcheck shell=bash
# What the scripts of this folder share: find a Python, make .venv, install the project into it, run a module from it.
# To be sourced; it defines and runs nothing by itself. bash 3.2 or newer, and no tool beyond POSIX and Python.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
# Sets which environment the functions below make and use. The second argument, if any, is the Python of another
# environment, whose packages this one sees: only what it has otherwise is installed again.
use_venv() {
    VENV=$1
    BASE_PYTHON=${2-}
    VENV_PYTHON=$VENV/bin/python
    # Present in every .venv these scripts made: such a folder may be deleted, anyone else's may not.
    VENV_MARK=$VENV/.made-by-launch
}
use_venv "$ROOT/.venv"
# What a machine without a GPU gets. Unpinned, pip brings the newest CUDA build, several GB that nothing here can use.
CPU_TORCH=2.13.0
PROGRAM=${0##*/}

# Settings that would send an install elsewhere than .venv, or a Python to another standard library.
unset PYTHONHOME
export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '%s: %s\n' "$PROGRAM" "$*" >&2; }

die() {
    say "$*"
    exit 2
}

# True if the NVIDIA driver lists a device that is not hidden from this shell.
has_gpu() {
    case ${CUDA_VISIBLE_DEVICES-all} in '' | -1) return 1 ;; esac
    local smi
    for smi in nvidia-smi /usr/local/nvidia/bin/nvidia-smi /usr/lib/wsl/lib/nvidia-smi; do
        if "$smi" -L 2>/dev/null | grep '^GPU ' >/dev/null; then return 0; fi
    done
    return 1
}

# Prints "fits", or why the given interpreter does not. A name on PATH proves nothing: pyenv puts shims there for
# versions that do not run, and Debian splits venv from Python.
judge_python() {
    "$1" -c '
import sys
version = "%d.%d" % sys.version_info[:2]
if not (3, 10) <= sys.version_info[:2] <= (3, 13):
    print("is Python %s" % version)
elif sys.maxsize < 2**32:
    print("is a 32-bit Python")
else:
    try:
        import ensurepip, venv
        print("fits")
    except ImportError:
        print("lacks the venv or the ensurepip module (Debian and Ubuntu: apt install python%s-venv)" % version)
' 2>/dev/null || echo "does not run"
}

# True if the interpreter already has a torch that is new enough and reaches a GPU.
has_cuda_torch() {
    "$1" -c '
import sys, torch
fits = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)
sys.exit(not (fits and torch.cuda.is_available()))
' 2>/dev/null
}

# Prints the path of the interpreter to build .venv from: $PYTHON if set, else the first on PATH that fits. 3.11 comes
# first since CPU builds of torch are the most likely to be at hand for it; where there is a GPU, a Python whose torch
# already reaches it comes before all.
find_python() {
    local name path verdict rejected='' fitting=''
    for name in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3.10 python3 python; do
        if path=$(command -v "$name"); then
            verdict=$(judge_python "$path")
        else
            path=$name verdict='is not there'
        fi
        if [[ $verdict == fits ]]; then
            if [[ -n ${PYTHON:-} || $1 != gpu ]]; then
                echo "$path"
                return
            fi
            if has_cuda_torch "$path"; then
                echo "$path"
                return
            fi
            [[ -n $fitting ]] || fitting=$path
        elif [[ -n ${PYTHON:-} ]]; then
            die "PYTHON=$PYTHON $verdict; Python 3.10 to 3.13 with its venv module is needed"
        elif [[ $verdict != 'is not there' ]]; then
            rejected+=$'\n'"    $path $verdict"
        fi
    done
    if [[ -z $fitting ]]; then
        die "no usable Python found. Install Python 3.10 to 3.13 with its venv module, or name one: PYTHON=/path/to/python3.11 $0${rejected:+$'\n'"  looked at:$rejected"}"
    fi
    echo "$fitting"
}

# Lets .venv see what the given interpreter has installed. `venv --system-site-packages` would not do where that
# interpreter is itself in a virtual environment: the new one then gets the packages of the Python below both.
inherit_packages() {
    # Up to Python 3.11 venv brings an old setuptools, which would hide the inherited one.
    "$VENV_PYTHON" -m pip uninstall -qq --yes setuptools
    "$1" -c '
import os, site, sys, torch
home = os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__)))
for folder in dict.fromkeys([home, *site.getsitepackages()]):
    if os.path.isdir(folder):
        print("import site; site.addsitedir(%r)" % folder)
' >"$("$VENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/inherited.pth"
}

# Makes sure that .venv holds a Python that runs and has pip. What an interrupted run left is made anew; a folder that
# is not ours is moved aside, not deleted.
make_venv() {
    local verdict python aside
    if [[ -x $VENV_PYTHON ]]; then
        verdict=$(judge_python "$VENV_PYTHON")
        case $verdict in is*) die "$VENV $verdict; Python 3.10 to 3.13 is needed: remove it, or rename it, and run again" ;; esac
        if "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then return; fi
        # uv makes environments without pip.
        if [[ ! -e $VENV_MARK ]] && "$VENV_PYTHON" -m ensurepip >/dev/null 2>&1; then return; fi
    fi
    python=$BASE_PYTHON
    [[ -n $python ]] || python=$(find_python "$1") || exit $?
    if [[ -e $VENV_MARK ]]; then
        say "$VENV is half-made: making it anew"
        rm -rf "$VENV" || die "cannot remove $VENV"
    elif [[ -e $VENV || -L $VENV ]]; then
        aside=$VENV.broken.$$
        mv "$VENV" "$aside" || die "cannot move $VENV aside"
        say "$VENV held no working Python: moved to $aside"
    fi
    say "making $VENV with $python ($("$python" -c 'import platform; print(platform.python_version())'))"
    { mkdir "$VENV" && touch "$VENV_MARK"; } || die "cannot write to $ROOT: clone the repository to a folder you may write to"
    "$python" -m venv "$VENV" || die "$python could not make a virtual environment in $VENV: see its message above"
    if [[ -n $BASE_PYTHON ]] || { [[ $1 == gpu ]] && has_cuda_torch "$python"; }; then inherit_packages "$python"; fi
}

# Installs what is given into .venv.
pip_install() {
    # In a terminal pip shows its progress; in a log only its errors matter.
    local quiet=-qq
    [[ -t 2 ]] && quiet=--progress-bar=on
    # Python compiles what is imported, when it is; pip would compile all that is installed, for a fifth of the time.
    "$VENV_PYTHON" -m pip install "$quiet" --no-compile "$@" ||
        die "pip could not install $*: its message is above. It needs a package index; behind a proxy or without a network set HTTPS_PROXY, PIP_INDEX_URL, or PIP_FIND_LINKS to a folder of wheels"
}

# What an install depends on; when it changes, the install is repeated.
install_key() {
    printf '%s %s ' "$ROOT" "$1"
    [[ -z $BASE_PYTHON ]] || "$BASE_PYTHON" -V
    cat "$ROOT"/{pyproject.toml,setup.py,flashoptim_dist/_version.py,launch/lib.sh} | cksum
}

# Installs the project, editable, with its extras. An installed torch is kept if it is new enough; otherwise the CPU
# build comes first, before anything that depends on torch, or, with a GPU, whatever pyproject.toml lets pip choose.
fill_venv() {
    make_venv "$1"
    if [[ $1 == cpu ]] && ! installed 'torch>=2.11'; then pip_install "torch==$CPU_TORCH"; fi
    # The build runs in .venv, not in an isolated environment: that would need the index at every install.
    installed 'setuptools>=77' || pip_install 'setuptools>=77'
    pip_install --no-build-isolation --editable "${ROOT}[$2]"
}

imports() {
    (cd / && "$VENV_PYTHON" -c 'import torch, flashoptim_dist, flashoptim_dist.kernels')
}

# Makes .venv hold the project with the given extras ("recipes", or "dev,recipes"); does nothing if it does already.
install_project() {
    local extras=$1 stamp=$VENV/.installed-$1 machine=cpu
    [[ -w $ROOT ]] || die "cannot write to $ROOT: clone the repository to a folder you may write to"
    # One install at a time in a clone; held until this shell closes the descriptor.
    if command -v flock >/dev/null; then
        exec 9<"$ROOT"
        flock -n 9 || { say "waiting for another install in $ROOT" && flock 9; }
    fi
    if [[ ! -x $VENV_PYTHON || ! -f $stamp || $(<"$stamp") != "$(install_key "$extras")" ]]; then
        say "installing flashoptim_dist with $extras in $VENV; the first time takes minutes"
        if has_gpu; then machine=gpu; fi
        fill_venv "$machine" "$extras"
        if ! imports && [[ -e $VENV_MARK ]]; then
            say "$VENV is damaged: making it anew"
            rm -rf "$VENV" || die "cannot remove $VENV"
            fill_venv "$machine" "$extras"
        fi
        imports || die "the install in $VENV does not import: see above. Remove $VENV and run again"
        install_key "$extras" >"$stamp" || die "cannot write $stamp"
    fi
    if command -v flock >/dev/null; then exec 9<&-; fi
}

# True if .venv has a distribution that satisfies the requirement, e.g. 'torch>=2.11'.
installed() {
    (cd / && "$VENV_PYTHON" -c '
import sys
from importlib.metadata import version
from pip._vendor.packaging.requirements import Requirement
wanted = Requirement(sys.argv[1])
sys.exit(not wanted.specifier.contains(version(wanted.name), prereleases=True))
' "$1") 2>/dev/null
}

# `python -m MODULE ARGUMENTS` from .venv, without the current folder on sys.path (transformers would take the
# repository's kernels/ for the package of that name), and independent of the scripts in .venv/bin, which a moved clone
# or an inherited package leaves wrong or missing.
run_module() {
    "$VENV_PYTHON" -c '
import runpy, sys
sys.path[:] = [folder for folder in sys.path if folder]
sys.argv.pop(0)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
' "$@"
}
