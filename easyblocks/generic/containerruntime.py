##
# Copyright 2026 the slingtorch authors
#
# This file is part of slingtorch, an EasyBuild bundle: it subclasses EasyBuild's classes and is distributed under
# the same licence, the GNU General Public License version 2 (see the file LICENSE).
##
"""
EasyBuild support for the container runtime, Apptainer or Singularity: pulling, building and verifying images,
implemented as the base of the easyblocks for container images.
"""
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess

from easybuild.easyblocks.generic.runscripts import RunScripts
from easybuild.tools.build_log import EasyBuildError, EasyBuildExit, print_msg
from easybuild.tools.run import run_shell_cmd

# what a container runtime prints -> what it means and what to do
RUNTIME_ERRORS = [
    (r'no space left|disk quota exceeded', "there is no space left. The runtime unpacks in $APPTAINER_TMPDIR or "
     "$SINGULARITY_TMPDIR (else /tmp) and keeps what it downloads in $APPTAINER_CACHEDIR or $SINGULARITY_CACHEDIR "
     "(else in the home directory): point them to a place with room"),
    (r'digest.*(mismatch|match|verif)|(mismatch|verif).*digest|unexpected digest|got "?sha256:.*want',
     "what the registry delivered does not have the digest of the address. Do not use it; ask who published it"),
    (r'unauthorized|(?<!permission )denied|\b40[13]\b', "the registry refuses. Log in with 'apptainer registry login' "
     "or 'singularity remote login', or correct the address"),
    (r'manifest unknown|manifest_unknown|name unknown|name_unknown|not found|\b404\b', "the registry has no such "
     "image. Compare address and digest with what the publisher says; images can be deleted"),
    (r'no such host|connection re(fused|set)|timeout|timed out|unreachable|dial tcp|tls|certificate|\b50\d\b',
     "the registry does not answer. Compute nodes often have no network: run 'eb --fetch' on a login node first, or "
     "set $https_proxy"),
]


class ContainerRuntime(RunScripts):
    """Calls the container runtime that is there, through spython where it has the call."""

    def runtime(self, doing):
        """
        Name of the container runtime: whichever of the two is there.

        :param doing: what it is needed for, for the error when there is none
        """
        for name in ['singularity', 'apptainer']:
            if shutil.which(name):
                return name
        raise EasyBuildError("Neither singularity nor apptainer is in the PATH; one of them is needed for %s. Run eb "
                             "on a node that has it (often a compute node), or load its module first", doing)

    def spython_client(self, doing):
        """
        Client of spython that calls the runtime that is there (on its own it knows the name singularity only).

        :param doing: what it is needed for, for the error when it is not installed
        """
        runtime = self.runtime(doing)
        try:
            from spython.main import get_client
        except ImportError as err:
            raise EasyBuildError("The Python package spython is needed for %s (%s). Install it for the Python that "
                                 "runs eb: python3 -m pip install spython", doing, err)
        client = get_client(quiet=True)
        client._init_command = lambda action, flags=None: (
            [runtime] + (flags or []) + (action if isinstance(action, list) else [action]))
        return client

    @contextlib.contextmanager
    def no_bind_mounts(self):
        """Bind mounts of the user's shell must not get into an image that is being made."""
        names = [runtime + kind for runtime in ['SINGULARITY', 'APPTAINER']
                 for kind in ['_BIND', '_BINDPATH', '_MOUNT']]
        saved = {name: os.environ.pop(name) for name in names if name in os.environ}
        try:
            yield
        finally:
            os.environ.update(saved)

    def pull_image(self, address, path):
        """
        Pull an image from a registry; the runtime verifies its digest.

        :param address: address with digest
        :param path: file to make
        """
        client = self.spython_client("pulling %s" % address)
        print_msg("pulling %s...", address, log=self.log, silent=self.silent)
        lines = []
        with self.no_bind_mounts():
            try:
                _, stream = client.pull(image=address, name=path, stream=True, quiet=True)
                for line in stream:
                    lines.append(line)
                    self.log.info("pull: %s", line.rstrip())
            except subprocess.CalledProcessError as err:
                self.raise_runtime_error("Pulling %s" % address, ''.join(lines), err.returncode)

    def raise_runtime_error(self, doing, output, status, known=RUNTIME_ERRORS):
        """Turn what the runtime printed into an error that says what to do."""
        # what kind of failure it was is in its last words
        text = '\n'.join(output.strip().splitlines()[-15:])
        for regex, meaning in known:
            if re.search(regex, text, re.I):
                raise EasyBuildError("%s failed: %s.\nIts last lines were:\n%s", doing, meaning, text,
                                     exit_code=EasyBuildExit.FAIL_DOWNLOAD)
        raise EasyBuildError("%s failed with status %s. Its last lines were:\n%s", doing, status, text)

    def build_image(self, definition, options, path):
        """
        Build an image in the build directory.

        :param definition: name of the definition file
        :param options: list of options for the runtime
        :param path: file to make
        """
        # not through spython: its build call keeps the output out of EasyBuild's log
        runtime = self.runtime("building an image from %s" % definition)
        cmd = [runtime, 'build'] + options + [path, definition]
        with self.no_bind_mounts():
            res = run_shell_cmd(' '.join(shlex.quote(word) for word in cmd), work_dir=self.builddir,
                                fail_on_error=False)
        if res.exit_code != EasyBuildExit.SUCCESS:
            self.raise_runtime_error("Building the image from %s with %s" % (definition, runtime), res.output,
                                     res.exit_code, known=RUNTIME_ERRORS[:1])

    def verify_signature(self, path, key):
        """
        Have the runtime verify who signed an image.

        :param path: the image
        :param key: fingerprint of a PGP key in the runtime's keyring, or name of a file with a public key (.pem)
        """
        runtime = self.runtime("verifying the signature of an image")
        fingerprint = re.sub(r'\s|^0x', '', key).upper()
        is_file = not re.match('^[0-9A-F]{40,64}$', fingerprint)
        options = '--key %s' % shlex.quote(self.obtain_file(key)) if is_file else '--json'
        res = run_shell_cmd('%s verify %s %s' % (runtime, options, shlex.quote(path)), fail_on_error=False, hidden=True,
                            split_stderr=True)
        output = '\n'.join([res.output.strip(), (res.stderr or '').strip()]).strip()
        if res.exit_code == EasyBuildExit.SUCCESS:
            others = [] if is_file else [signer for signer in signers(res.output) if signer != fingerprint]
            if is_file or not others:
                self.log.info("Signature of %s by %s verified", path, key)
                return
            # the runtime accepts any key that it knows or finds on a key server, for each part of the image another one
            output = "What is in it was signed by %s" % ', '.join(others)
        raise EasyBuildError("The image is not signed by the key %s. Do not use it, or correct 'verify_key'; the key "
                             "itself must be known ('%s key list' shows which are, '%s key import' or 'key pull' adds "
                             "one). The runtime says:\n%s", key, runtime, runtime, output)


def signers(output):
    """
    Who signed the file systems in an image: fingerprints of PGP keys, or 'nobody'.

    :param output: what 'verify --json' printed, {"SignerKeys": [{"Signer": {"Partition": "FS", ...}}, ...]}
    """
    try:
        keys = [entry['Signer'] for entry in json.loads(output)['SignerKeys'] or []]
        found = sorted({key['Fingerprint'].upper() if key['DataCheck'] and key['KeyCheck'] else 'nobody'
                        for key in keys if key['Partition'] == 'FS'})
    except (KeyError, TypeError, ValueError) as err:
        raise EasyBuildError("What 'verify --json' printed is not understood (%r): %s", err, output)
    return found or ['nobody']
