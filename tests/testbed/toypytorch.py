# SPDX-License-Identifier: GPL-2.0-only
"""A PyTorch that is a few files, for which slingmpi can be built in a second: in place of slingmpi's sources one file
is compiled, which uses MPI, by the same setup.py, compiler and flags."""

import importlib.util
import pathlib
import shutil

from . import quickvenv, run, wheels

STAND_IN = r"""
#include <Python.h>
#include <mpi.h>
static PyObject *start(PyObject *, PyObject *) { return PyLong_FromLong(MPI_Init(nullptr, nullptr)); }
static PyMethodDef methods[] = {{"start", start, METH_NOARGS, nullptr}, {}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_backend", nullptr, -1, methods};
PyMODINIT_FUNC PyInit__backend() { return PyModule_Create(&definition); }
"""
CPP_EXTENSION = f'''
import os, setuptools
from setuptools.command.build_ext import build_ext as BuildExtension

def CppExtension(name, sources, **settings):
    os.makedirs('build', exist_ok=True)
    with open('build/stand_in.cpp', 'w') as file:
        file.write({STAND_IN!r})
    return setuptools.Extension(name, ['build/stand_in.cpp'], language='c++', **settings)
'''
DISTRIBUTED = """
class Backend:
    def register_backend(name, *args, **kwargs):
        setattr(Backend, name.upper(), name)
def register_rendezvous_handler(*args):
    pass
from . import distributed_c10d
"""


def make(path, version, python='/usr/bin/python3', **torch):
    """
    A virtual environment with such a PyTorch.

    :param path: of the environment
    :param version: as torch.__version__ has it
    :param torch: what wheels.toy_torch() takes: cuda, hip, nccls
    """
    run([f'{quickvenv.python3(python)}/python3', '-m', 'venv', path])
    packages, = path.glob('lib/python3*/site-packages')
    files = wheels.toy_torch(path / 'libraries', version, **torch)
    files['torch/__init__.py'] += f'from . import _C\n__version__ = {version!r}\n'
    files['torch/_C.py'] = '_GLIBCXX_USE_CXX11_ABI = True\n'
    files['torch/utils/__init__.py'] = ''
    files['torch/utils/cpp_extension.py'] = CPP_EXTENSION
    files['torch/distributed/__init__.py'] += DISTRIBUTED
    files['torch/distributed/distributed_c10d.py'] = 'default_pg_timeout = None\n'
    info = f'torch-{version}.dist-info'
    files[f'{info}/METADATA'] = f'Metadata-Version: 2.1\nName: torch\nVersion: {version}\n'
    files[f'{info}/INSTALLER'] = 'nobody\n'
    for name, text in files.items():
        file = packages / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    for old in [*packages.glob('setuptools*'), *packages.glob('_distutils_hack')]:
        shutil.rmtree(old)
    # new enough for slingmpi (setup.cfg)
    own = pathlib.Path(importlib.util.find_spec('setuptools').origin).parents[1]
    for source in [*own.glob('setuptools*'), own / '_distutils_hack']:
        shutil.copytree(source, packages / source.name)
    return path
