# SPDX-License-Identifier: GPL-2.0-only
"""What of the bundle is for x86_64 alone: found in its files, and compared with what the documentation says.

tests/stages/test_aarch64_emulated.py runs bash's and Python's part on aarch64.
"""
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
CODE = ('easyblocks', 'hooks', 'runscripts', 'slingtorch', 'torch-mpi')
# a processor's name, a directory of libraries that only some machines have, a GPU that only x86_64 nodes have
BOUND = re.compile(r'x86[_-]64|amd64|linux-gnu|lib64|nvidia[78]0|gfx9\w+')
# where the code has such words, and why that is right on aarch64 too
RIGHT = {
    'easyblocks/aws_ofi_nccl.py': "lib64 where there is one, else lib",
    'easyblocks/generic/_environment_image.py': "all four directories of a system's libraries",
    'easyblocks/generic/_lockfile.py': "the form of wheel_platform, of both processors; what made a lock file",
    'easyblocks/generic/_pytorchprocess.py': "lib and lib64",
    'easyblocks/generic/pythonvenv.py': "the default of wheel_platform: an easyconfig for aarch64 names both",
    'easyblocks/horovod.py': "lib64 and lib",
    'easyblocks/pytorch_cray.py': "lib64 and lib; an example in a message",
    'hooks/sites/frontier.cfg': "a site with x86_64",
    'hooks/sites/lumi.cfg': "a site with x86_64",
    'hooks/sites/olivia.cfg': "a comment: its login nodes are x86_64",
    'hooks/slingshot_sites.py': "a site says its processor",
    'runscripts/lib/drivers.cfg': "for which processors an easyconfig has wheels",
    'runscripts/lib/mpi.bash': "all four directories of a system's libraries",
    'slingtorch/explain/faults.txt': "a remedy that names both",
    'slingtorch/explain/messages.txt': "lines of logs",
    'slingtorch/gpus.py': "the default of wheel_platform",
    'slingtorch/site_draft.py': "names of a system's directories",
    'slingtorch/siteformats.py': "tables name a processor that is another one",
    'slingtorch/site_probe.py': "lib64 and lib; types of GPUs as administrators write them",
    'slingtorch/job/machine.py': "a line of a driver, of any processor",
    'slingtorch/lock.py': "the default of wheel_platform",
}


def of_code(root):
    """Files of the code that have a word which binds them to a processor."""
    paths = [path for top in CODE for path in (root / top).rglob('*')
             if path.is_file() and '__pycache__' not in path.parts]
    return {str(path.relative_to(root)) for path in paths if BOUND.search(path.read_text(errors='replace'))}


def of_easyconfigs(root):
    """Easyconfigs whose wheels or container images have no aarch64: {name: why}."""
    found = {}
    for path in (root / 'easyconfigs').rglob('*.eb'):
        text, lock = path.read_text(), path.with_suffix('.lock')
        easyblock = re.search(r"^easyblock = '(\w+)'", text, re.M).group(1)
        if easyblock == 'PythonVenv':
            # a hand-made lock file says it at its head
            head = lock.read_text().partition('\n--only-binary')[0] if lock.exists() else ''
            said = re.findall('^wheel_platform = .*', text, re.M) + re.findall('^# .*', head, re.M)
            if not re.search('aarch64|both platforms', ' '.join(said)):
                found[path.name] = 'wheels'
        elif easyblock == 'Singularity' and re.search('rocm|cuda', path.name):
            found[path.name] = 'image'
    return found


def test_code():
    assert of_code(ROOT) == set(RIGHT)


def test_a_word_that_is_new_is_found(tmp_path):
    for top in CODE:
        (tmp_path / top).mkdir()
    (tmp_path / 'runscripts/x').write_text('export LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu\n')
    (tmp_path / 'easyconfigs').mkdir()
    (tmp_path / 'easyconfigs/a.eb').write_text("easyblock = 'PythonVenv'\n")
    assert of_code(tmp_path) == {'runscripts/x'} and of_easyconfigs(tmp_path) == {'a.eb': 'wheels'}


def test_gpu_transport_layer():
    """The variable of Cray MPICH follows from the GPU, so that a GH200 (9.0) asks for nvidia90."""
    text = ''.join(path.read_text() for path in sorted((ROOT / 'easyblocks').rglob('*.py')))
    assert [code for code, _ in re.findall(r"('PE_MPICH_GTL_DIR_\w*'.*) for arch in (.*)", text)] == [
        "'PE_MPICH_GTL_DIR_' + maker + arch.replace('.', '')"]
    assert not re.findall(r'PE_MPICH_GTL_DIR_[a-z]', text)


def test_the_page_says_it():
    page = (ROOT / 'docs/easyconfigs.md').read_text()
    table = page[page.index('## aarch64'):].split('\n## ')[0]
    found = of_easyconfigs(ROOT)
    wheels = sorted(name for name, why in found.items() if why == 'wheels')
    assert sorted(re.findall(r'`(PyTorch-\S+\.eb)`', table.split('Container images')[0])) == wheels
    assert len(found) - len(wheels) > 8 and 'Container images' in table
