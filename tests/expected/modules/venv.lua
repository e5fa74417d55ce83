help([==[

Description
===========
Tiny


More information
================
 - Homepage: https://example.org
]==])

whatis([==[Description: Tiny]==])
whatis([==[Homepage: https://example.org]==])
whatis([==[URL: https://example.org]==])

local root = "ROOT"

conflict("PyTorch")
prepend_path("PATH", pathJoin(root, "runscripts"))

prepend_path("PATH", pathJoin(root, "bin"))
setenv("EBROOTPYTORCH", root)
setenv("EBVERSIONPYTORCH", "0.1")
setenv("EBDEVELPYTORCH", pathJoin(root, "easybuild", "PyTorch-0.1-tiny-easybuild-devel"))

setenv("RUNSCRIPTS", pathJoin(root, "runscripts"))
setenv("RUNSCRIPTSPYTORCH", pathJoin(root, "runscripts"))
setenv("SLINGTORCH_GPU_VISIBILITY", "ROCR_VISIBLE_DEVICES")
pushenv("VIRTUAL_ENV", "ROOT")
pushenv("PYTHONNOUSERSITE", "1")
setenv("SLINGTORCH_MODULE_PYTORCH", "PyTorch/0.1-tiny")
setenv("EBROOTPYTHON", "ROOT")
setenv("EBVERSIONPYTHON", "PYTHON")
-- Built with EasyBuild version 5.4.1
