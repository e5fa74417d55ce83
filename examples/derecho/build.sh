#!/bin/bash
# SPDX-License-Identifier: GPL-2.0-only
# Installs PyTorch with torchvision and mpi4py, NCCL and the OFI plugin, on one CPU node of Derecho.
#
#   PBS_ACCOUNT=<project> examples/derecho/build.sh [--option=value ...] [NAME.eb ...]        on a login node
#
# There everything is downloaded (nodes have no network), then a job is submitted to do the rest; this script waits for
# it and ends with its status. The job runs in the directory where this was started, with the same settings of EasyBuild
# and slingtorch. Where to install is EasyBuild's own setting: its configuration file, EASYBUILD_PREFIX, or --prefix=DIR
# here, as any other option of eb. NCARENV names the generation of modules: 23.09, 24.12 from PyTorch 2.5.1 on, 25.10
# from 2.14.1 on.
set -euo pipefail

default=PyTorch-2.4.0-derecho-cray-mpich.eb
generation=${NCARENV:-23.09}

die() { printf 'build.sh: %s\n' "$*" >&2; exit 1; }

# needs COMMAND REMEDY: the directory of a command, which must be there
needs() (
    path=$(type -P "$1") || die "the command $1 is not in PATH: $2"
    cd -- "$(dirname "$path")" > /dev/null && pwd
)

# load_ncarenv GENERATION: the login node and the job get the same modules
load_ncarenv() {
    # a batch shell may not have the command module
    if ! type module > /dev/null 2>&1; then
        local init=/etc/profile.d/z00_modules.sh
        [[ -r $init ]] || die "there is no command module, and no $init: is this Derecho?"
        # not written for set -u
        set +u
        # shellcheck disable=SC1090
        . "$init"
        set -u
    fi
    # ncarenv survives an ordinary purge
    module --force purge
    module load "ncarenv/$1" || die "module load ncarenv/$1 failed: NCARENV must be a generation that is on Derecho"
}

# setting OPTION: its value, out of what eb said about its configuration
setting() { sed -n "s/^$1  *([A-Z]) = //p" <<< "$config"; }

# job_script ARGUMENT...: prints the job. The settings are in its text, quoted by bash: a list for qsub -v ends values
# at commas, and qsub -V would bring everything else of this shell too, its loaded modules and functions.
job_script() {
    cat << 'END'
#!/bin/bash
#PBS -N slingtorch-build
#PBS -q main
#PBS -l select=1:ncpus=128:mem=230GB
#PBS -l walltime=04:00:00
#PBS -j oe
set -euo pipefail
END
    local name
    while read -r name; do
        case $name in
            EASYBUILD_* | SLINGTORCH_* | EB_* | CCACHE_* | XDG_CONFIG_*) printf 'export %s=%q\n' "$name" "${!name}" ;;
        esac
    done < <(compgen -e)
    # shellcheck disable=SC2016  # PATH is the job's
    printf 'PATH=%q:$PATH%q\n' "$commands" "$ccache"
    declare -f die load_ncarenv
    printf 'load_ncarenv %q\n' "$generation"
    printf 'cd %q\n' "$PWD"
    printf 'exec eb'
    printf ' %q' "$@" --robot
    printf '\n'
}

[[ -z ${PBS_JOBID-} ]] || die "this is a job already, $PBS_JOBID, where nothing can be downloaded. Start this script on
a login node, without qsub: it submits a job itself. To build in this job, type on a login node first
    eval \"\$(slingtorch env --site derecho)\"; eb NAME.eb --robot --fetch
and here the same without --fetch."
[[ -n ${PBS_ACCOUNT-} ]] || die "name the project to charge: PBS_ACCOUNT=<project> $0"

named=''
for word in "$@"; do
    case $word in
        # slingtorch env puts downloads below the prefix too, and does not see options
        --prefix=*) export EASYBUILD_PREFIX=${word#--prefix=} ;;
        -*) ;;
        *.eb) named=1 ;;
        *) die "'$word' is neither an easyconfig (NAME.eb) nor an option; options are written as --prefix=DIR" ;;
    esac
done
[[ -n $named ]] || set -- "$default" "$@"

commands=$(needs slingtorch "activate the environment that it is installed in, or make one:
    python3 -m venv DIR; DIR/bin/pip install <the checkout or the wheel of slingtorch>; . DIR/bin/activate")
load_ncarenv "$generation"
# also if a module, which is gone now, had brought it
PATH=$commands:$PATH
eb=$(needs eb "it is installed with slingtorch: pip install <the checkout or the wheel of slingtorch>")
needs qsub "submit from a login node of Derecho" > /dev/null
[[ $eb == "$commands" ]] || commands=$eb:$commands
ccache=$(type -P ccache) && ccache=:$(dirname "$ccache")

activation=$(slingtorch env --site derecho)
eval "$activation"
config=$(eb "$@" --show-full-config) || die "eb does not take its settings or options, see above: $config"
# as many compilations as fit: they need up to 4 GiB each, and the easyblock starts fewer where memory is short
if grep -q '^max-parallel  *(D)' <<< "$config"; then
    export EASYBUILD_MAX_PARALLEL=96
fi
modules=$(setting installpath-modules)
[[ $modules != None ]] || modules=$(setting installpath)/$(setting subdir-modules)
modules+=/$(setting suffix-modules-path)

eb "$@" --robot --fetch || die "a download failed, see above; nothing was submitted"

# qsub takes a copy when it submits; mktemp makes a file that nobody else can read
job=$(mktemp "${TMPDIR:-/tmp}/slingtorch-build.XXXXXX")
trap 'rm -f "$job"' EXIT
job_script "$@" > "$job"
status=0
qsub -A "$PBS_ACCOUNT" -W block=true "$job" || status=$?
if [[ $status != 0 ]]; then
    printf 'build.sh: not submitted, or not installed (status %s): slingtorch-build.o<number> says why\n' "$status" >&2
    exit "$status"
fi
printf 'Installed. To have the modules in a shell or job:\n    module use %q\n' "$modules"
