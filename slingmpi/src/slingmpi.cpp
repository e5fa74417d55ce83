// SPDX-License-Identifier: GPL-2.0-only
// The extension as one unit: PyTorch's headers take longer to compile than all of this.
#include "mpi_types.cpp"
#include "engine.cpp"
#include "backend.cpp"
#include "module.cpp"
