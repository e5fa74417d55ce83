#!/bin/bash
# SPDX-License-Identifier: GPL-2.0-only
# Installs PyTorch with torchvision and mpi4py, NCCL and the OFI plugin, on one CPU node of Derecho.
#
#   PBS_ACCOUNT=<project> examples/derecho/build.sh [--option=value ...] [NAME.eb ...]        on a login node
#
# The script downloads everything on the login node (nodes have no network), submits a job that does the rest, waits for
# the job and ends with its status. The job runs in the directory where you started the script, with the same settings
# of EasyBuild and slingtorch. To choose where to install, use EasyBuild's configuration file, EASYBUILD_PREFIX, or
# --prefix=DIR here, like any other option of eb. NCARENV names the generation of modules: 23.09, 24.12 (PyTorch 2.5.1
# and newer) or 25.10 (wheels).
set -euo pipefail

default=PyTorch-2.4.0-derecho-cray-mpich.eb
generation=${NCARENV:-23.09}

die() { printf 'build.sh: %s\n' "$*" >&2; exit 1; }

# needs COMMAND REMEDY: prints the directory of a command; ends if the command does not exist
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
        # this file fails under set -u
        set +u
        # shellcheck disable=SC1090
        . "$init"
        set -u
    fi
    # ncarenv survives an ordinary purge
    module --force purge
    module load "ncarenv/$1" || die "module load ncarenv/$1 failed: NCARENV must be a generation that exists on Derecho"
}

# setting OPTION: prints its value from eb's configuration
setting() { sed -n "s/^$1  *([A-Z]) = //p" <<< "$config"; }

# job_script ARGUMENT...: prints the job script, which contains the settings, quoted by bash. qsub -v would end values
# at commas, and qsub -V would also pass everything else in this shell, such as loaded modules and functions.
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

[[ -z ${PBS_JOBID-} ]] || die "this is already a job, $PBS_JOBID, and a job cannot download. Start this script on
a login node without qsub: it submits a job itself. To build in this job, first run on a login node
    eval \"\$(slingtorch env --site derecho)\"; eb NAME.eb --robot --fetch
and then the same here without --fetch."
[[ -n ${PBS_ACCOUNT-} ]] || die "name the project to charge: PBS_ACCOUNT=<project> $0"

named=''
for word in "$@"; do
    case $word in
        # slingtorch env also puts downloads below the prefix, but does not see options
        --prefix=*) export EASYBUILD_PREFIX=${word#--prefix=} ;;
        -*) ;;
        *.eb) named=1 ;;
        *) die "'$word' is neither an easyconfig (NAME.eb) nor an option; options are written as --prefix=DIR" ;;
    esac
done
[[ -n $named ]] || set -- "$default" "$@"

commands=$(needs slingtorch "activate the environment that it is installed in, or create one:
    python3 -m venv DIR; DIR/bin/pip install <the checkout or the wheel of slingtorch>; . DIR/bin/activate")
load_ncarenv "$generation"
# still needed if load_ncarenv has just unloaded the module that provided slingtorch
PATH=$commands:$PATH
eb=$(needs eb "it is installed with slingtorch: pip install <the checkout or the wheel of slingtorch>")
needs qsub "submit from a login node of Derecho" > /dev/null
[[ $eb == "$commands" ]] || commands=$eb:$commands
ccache=$(type -P ccache) && ccache=:$(dirname "$ccache")

activation=$(slingtorch env --site derecho)
eval "$activation"
config=$(eb "$@" --show-full-config) || die "eb does not accept its settings or options, see above: $config"
# as many compilations as fit: they need up to 4 GiB each, and the easyblock starts fewer if memory is short
if grep -q '^max-parallel  *(D)' <<< "$config"; then
    export EASYBUILD_MAX_PARALLEL=96
fi
modules=$(setting installpath-modules)
[[ $modules != None ]] || modules=$(setting installpath)/$(setting subdir-modules)
modules+=/$(setting suffix-modules-path)

eb "$@" --robot --fetch || die "a download failed, see above; nothing was submitted"

# qsub copies the script when it submits; mktemp creates a file that nobody else can read
job=$(mktemp "${TMPDIR:-/tmp}/slingtorch-build.XXXXXX")
trap 'rm -f "$job"' EXIT
job_script "$@" > "$job"
status=0
qsub -A "$PBS_ACCOUNT" -W block=true "$job" || status=$?
if [[ $status != 0 ]]; then
    printf 'build.sh: not submitted, or the job failed (status %s): see slingtorch-build.o<number>\n' "$status" >&2
    exit "$status"
fi
printf 'Installed. To use the modules in a shell or job:\n    module use %q\n' "$modules"
