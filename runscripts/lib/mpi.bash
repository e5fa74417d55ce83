# SPDX-License-Identifier: GPL-2.0-only
# Checks that the MPI of Python understands what started the ranks. If not, each rank becomes a job of its own (rank 0
# of 1), ends with an error about PMI, or hangs. Sourced by conda-python-distributed, after ranks.bash, if
# SLINGTORCH_MPI is set or the launcher has no PMI.

# kind of the first MPI library in these directories -> mpi, mpi_dir; mpi is "both" for Open MPI and MPICH in one
# directory
_find_mpi() {
    local name
    mpi='' mpi_dir=''
    for mpi_dir; do
        for name in "$mpi_dir"/libmpi_{cray,gnu,intel,amd,nvidia}*.so.12 "$mpi_dir"/lib{mpi,mpich}.so.12; do
            [[ -z $mpi && -e $name ]] || continue
            mpi=mpich
            [[ ${name##*/} != libmpi_* ]] || mpi=cray
        done
        for name in "$mpi_dir"/libmpi.so.[24]0; do
            [[ ! -e $name ]] || mpi=${mpi:+both} mpi=${mpi:-openmpi}
        done
        [[ -z $mpi ]] || return 0
    done
}

_check_mpi() {
    local -A mpis=([openmpi]='Open MPI' [mpich]=MPICH [cray]='Cray MPICH' [both]='MPI')
    local mpi mpi_dir own=$SLINGTORCH_MPI bound bound_dir spoken speaker where='of this Python'
    local dir name remedy off='unset SLINGTORCH_MPI'
    local -a searched=() system=()
    case $own in
        auto | openmpi | mpich) ;;
        *) _fail 1 "SLINGTORCH_MPI='$own' is not one of auto, openmpi, mpich. Set it to the MPI that Python will use," \
            "or unset it if the ranks do not use MPI" ;;
    esac
    ((world_size > 1)) && [[ ${HOROVOD_CONTROLLER-} != gloo ]] || return 0
    [[ -z ${APPTAINER_CONTAINER-}${SINGULARITY_CONTAINER-} ]] ||
        where='in the container' off='export APPTAINERENV_SLINGTORCH_MPI= SINGULARITYENV_SLINGTORCH_MPI='

    # What started the ranks. Cray's PMI, from PALS and Slurm's cray_shasta, works only with Cray MPICH: MPICH 4.0
    # started as single ranks under cray_shasta.
    case $launcher in
        openmpi) spoken=PMIx speaker='mpirun of Open MPI' ;;
        hydra | pmi) spoken=PMI speaker='mpiexec of an MPICH' ;;
        pals) spoken="Cray's PMI" speaker='mpiexec of PALS' ;;
        slurm)
            speaker="srun --mpi=${SLURM_MPI_TYPE:-none}"
            if [[ -n ${PMIX_RANK-} ]]; then spoken=PMIx
            elif [[ -n ${PALS_RANKID-} ]]; then spoken="Cray's PMI"
            elif [[ -n ${PMI_FD-}${PMI_PORT-} ]]; then spoken=PMI
            else spoken='no PMI'
            fi ;;
        *) return 0 ;;  # torchrun, or ranks that were started one by one: they find each other without MPI
    esac

    # What Python will use. A library of the host in the search path can replace only one with the same ABI.
    local IFS=:
    set -f
    # shellcheck disable=SC2206  # split at colons
    searched=(${LD_LIBRARY_PATH-}) system=(${_system_libraries:-/usr/local/lib:/usr/local/lib64:/usr/lib64:/usr/lib})
    set +f
    IFS=$' \t\n'
    [[ -n $_system_libraries ]] || system+=(/usr/lib/*-linux-gnu /opt/*/lib)
    _find_mpi ${searched[@]+"${searched[@]}"}
    bound=$mpi bound_dir=$mpi_dir
    if [[ $own == auto ]]; then
        [[ -n $bound ]] || _find_mpi "${system[@]}"
        own=$mpi
        case $own in
            '') _fail 1 "SLINGTORCH_MPI=auto: no MPI was found in LD_LIBRARY_PATH or ${system[*]}. Name" \
                "the one that Python will use (SLINGTORCH_MPI=openmpi or mpich), or unset SLINGTORCH_MPI" ;;
            both) _fail 1 "SLINGTORCH_MPI=auto: $mpi_dir has Open MPI and MPICH. Name the one that Python will use:" \
                "SLINGTORCH_MPI=openmpi or mpich" ;;
        esac
    elif [[ $own/$bound == mpich/cray ]]; then
        own=cray
    fi

    case $own/$spoken/$launcher in
        openmpi/PMIx/* | mpich/PMI/* | cray/PMI/* | cray/"Cray's PMI"/*) return 0 ;;
        openmpi/*PMI/slurm)  # if it was built with Slurm's own library
            for dir in ${searched[@]+"${searched[@]}"} "${system[@]}"; do
                for name in "$dir"/openmpi/{,lib/openmpi*/}mca_pmix_s[12].so; do [[ ! -e $name ]] || return 0; done
            done ;;
    esac
    ((local_rank == 0)) || exit 1  # one message per node
    case $own in
        openmpi) remedy='srun --mpi=pmix (srun --mpi=list shows whether Slurm has it), or with mpirun of Open MPI' ;;
        mpich) remedy='srun --mpi=pmi2, or with mpiexec of an MPICH' ;;
        cray) remedy='srun --mpi=cray_shasta, or with mpiexec of PALS' ;;
    esac
    [[ -z $bound || $bound == both || $bound == "$own" ]] ||
        remedy+=". ${mpis[$bound]} in $bound_dir (LD_LIBRARY_PATH) cannot replace it: it has a different ABI"
    _fail 1 "the ${mpis[$own]} $where does not understand $speaker, which started the $world_size ranks and speaks" \
        "$spoken: each rank would be a job of its own, or hang. Start them with $remedy. If they use no MPI: $off"
}

# Without PMI, every rank is the only one for MPI (tests/real/test_mpi_of_ranks.py), so all would write the same files.
_warn_of_mpi4py() {  # PYTHON ARGUMENTS
    local word='' line
    local -a lines=()
    for word; do [[ $word != *.py ]] || break; done
    [[ $word == *.py && -f $word && -r $word ]] || return 0
    mapfile -n 2000 -t lines < "$word"
    for line in ${lines[@]+"${lines[@]}"}; do
        [[ $line =~ ^[[:blank:]]*(import|from)[[:blank:]]+mpi4py ]] || continue
        _say "$word imports mpi4py, but srun --mpi=${SLURM_MPI_TYPE:-none} started the $world_size ranks: for MPI," \
            "each is rank 0 of 1. Use RANK and WORLD_SIZE instead, or start the ranks with a PMI that this MPI" \
            "understands (srun --mpi=list): pmix for Open MPI, pmi2 for MPICH, cray_shasta for Cray MPICH"
        return
    done
}
