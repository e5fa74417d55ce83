# SPDX-License-Identifier: GPL-2.0-only
"""Images from a registry on the loopback address and from a definition file, with a real runtime."""

import base64
import gzip
import hashlib
import http.server
import io
import json
import os
import re
import shutil
import socket
import subprocess
import tarfile
import threading

import pytest
from testbed import smallimage

SIF_CONFIG, SIF_LAYER = 'application/vnd.sylabs.sif.config.v1+json', 'application/vnd.sylabs.sif.layer.v1.sif'
OCI = 'application/vnd.oci.image.{}'


class Registry:
    """As much of the distribution protocol as pulling needs, over plain HTTP.

    :ivar blobs: {digest: content}, of manifests too
    :ivar types: {digest: media type} of the manifests
    :ivar refuse: status with which everything is refused
    :ivar account: 'user:password' that every request must have; None for anybody
    """

    def __init__(self):
        self.blobs, self.types, self.refuse, self.account, self.requests = {}, {}, None, None, []
        registry = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'

            def answer(self):
                registry.requests.append(self.path)
                digest = self.path.rsplit('/', 1)[1]
                status, content, kind = 404, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}', 'application/json'
                sent = self.headers.get('Authorization', 'Basic ').partition(' ')[2]
                if registry.account and base64.b64decode(sent).decode() != registry.account:
                    status, content = 401, b'{"errors": [{"code": "UNAUTHORIZED"}]}'
                elif registry.refuse:
                    status, content = registry.refuse, b'{"errors": [{"code": "DENIED"}]}'
                elif self.path == '/v2/':
                    status, content = 200, b'{}'
                elif digest in registry.blobs:
                    status, content = 200, registry.blobs[digest]
                    kind = registry.types.get(digest, 'application/octet-stream')
                self.send_response(status)
                self.send_header('Content-Type', kind)
                self.send_header('Content-Length', str(len(content)))
                if status == 401:
                    self.send_header('WWW-Authenticate', 'Basic realm="members"')
                if status == 200 and self.path != '/v2/':
                    self.send_header('Docker-Content-Digest', digest)
                self.end_headers()
                if self.command == 'GET':
                    self.wfile.write(content)

            do_GET = do_HEAD = answer

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.host = f'127.0.0.1:{self.server.server_address[1]}'
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def add(self, content, kind=None):
        digest = 'sha256:' + hashlib.sha256(content).hexdigest()
        self.blobs[digest] = content
        if kind:
            self.types[digest] = kind
        return {'mediaType': kind or 'application/octet-stream', 'digest': digest, 'size': len(content)}

    def manifest(self, config, layer):
        kind = OCI.format('manifest.v1+json')
        content = json.dumps({'schemaVersion': 2, 'mediaType': kind, 'config': config, 'layers': [layer]}).encode()
        return self.add(content, kind)['digest']


@pytest.fixture(scope='module')
def registry():
    registry = Registry()
    yield registry
    registry.server.shutdown()
    registry.server.server_close()


@pytest.fixture(scope='module')
def layer(tmp_path_factory):
    """A compressed layer with a small file system, and the digest of what is in it."""
    root = tmp_path_factory.mktemp('layer')
    smallimage.file_system(root, python=False)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode='w') as archive:
        for path in sorted(root.iterdir()):
            archive.add(path, arcname=path.name)
    return gzip.compress(raw.getvalue(), 1), 'sha256:' + hashlib.sha256(raw.getvalue()).hexdigest()


@pytest.fixture
def docker(registry, layer):
    """Address of an image; its blobs are there again for each test."""
    registry.refuse = registry.account = None
    compressed, diff_id = layer
    config = json.dumps({'architecture': 'amd64' if os.uname().machine == 'x86_64' else 'arm64', 'os': 'linux',
                         'config': {'Env': ['PATH=/usr/bin:/bin']},
                         'rootfs': {'type': 'layers', 'diff_ids': [diff_id]}}).encode()
    digest = registry.manifest(registry.add(config, OCI.format('config.v1+json')),
                               registry.add(compressed, OCI.format('layer.v1.tar+gzip')))
    return f'docker://{registry.host}/small@{digest}'


class Site(smallimage.Site):
    """`eb` with a runtime that takes registries without encryption."""

    def __init__(self, directory, tool, runtime):
        super().__init__(directory, tool, runtime)
        self.env.update(APPTAINER_NOHTTPS='true', APPTAINER_CACHEDIR=str(directory / 'cache'))

    def eb(self, *args, **parameters):
        return ' '.join(super().eb(*args, **{'container_python': None, 'wrappers': ['cat'], **parameters}).split())

    def fails(self, *args, **parameters):
        out = super().fails(*args, **parameters)
        assert not self.module.exists() and not list(self.root.glob('*.sif')) and not self.parts()
        return out

    def facts(self):
        return json.loads((self.root / 'image.json').read_text())


@pytest.fixture
def site(tmp_path, lmod, runtime):
    return Site(tmp_path, lmod, runtime)


def test_pull_from_a_registry(site, docker, runtime):
    """By apptainer alone; it also reads the definition in the image."""
    only = site.directory / 'only'
    only.mkdir()
    (only / 'apptainer').symlink_to(runtime / 'apptainer')
    site.env['PATH'] = site.env['PATH'].replace(str(runtime), str(only))
    assert not shutil.which('singularity', path=site.env['PATH'])
    out = site.eb(image_address=docker)
    assert 'share/docker-defs is not created' not in out and '[SUCCESS]' in out
    assert list((site.root / 'share/docker-defs').iterdir())
    assert f'pulling {docker}' in out
    facts = site.facts()
    assert facts['origin'] == docker and facts['transfer'] == 'pull' and facts['file'] == 'small-1.0.sif'
    assert facts['sha256'] == smallimage.sha256(site.root / 'small-1.0.sif')
    assert not list(site.sources.iterdir())     # one copy, where it is used
    done = subprocess.run([site.root / 'bin/in-container', 'cat', '/etc/passwd'], env=site.env, stdout=subprocess.PIPE)
    assert done.stdout.startswith(b'root:')


def test_tag_without_digest(site, docker, registry):
    """The message says how to find the digest; its command installs, though the runtime takes tag or digest."""
    tag = docker.split('@')[0] + ':1.0'
    registry.requests.clear()
    out = site.fails(image_address=tag)
    assert f"skopeo inspect --format '{{{{.Digest}}}}' {tag} " in out and not registry.requests
    asked = re.search(r'Then run: eb Small-1.0.eb (--try-amend=\S+@sha256:)\.\.\.', out)[1]
    site.eb(asked + docker[-64:], image_address=tag)
    assert site.facts()['origin'] == f'{tag}@sha256:{docker[-64:]}'


def test_mirror(site, docker, registry):
    """registries.conf of the user names one: with an address that nothing answers the image comes from there."""
    conf = site.directory / 'home/.config/containers/registries.conf'
    conf.parent.mkdir(parents=True)
    conf.write_text(f'[[registry]]\nlocation = "docker.io"\n[[registry.mirror]]\nlocation = "{registry.host}"\n'
                    'insecure = true\n')
    site.env['HOME'] = str(site.directory / 'home')
    registry.account = 'me:secret'
    out = site.fails(image_address=docker.replace(registry.host, 'docker.io/library'))
    assert 'the registry refuses access. Log in' in out
    registry.account = None
    registry.requests.clear()
    site.eb(image_address=docker.replace(registry.host, 'docker.io/library'))
    assert any('/blobs/' in request for request in registry.requests)


# --- the runtime's own directories


def test_cache_that_the_user_names(site, docker, registry):
    (site.directory / 'file').touch()
    registry.requests.clear()
    site.env['APPTAINER_CACHEDIR'] = f'{site.directory}/file'
    out = site.fails(image_address=docker)
    assert f'cannot use {site.directory}/file ($APPTAINER_CACHEDIR): File exists' in out
    assert 'export APPTAINER_CACHEDIR=DIRECTORY' in out and not registry.requests
    site.env['APPTAINER_CACHEDIR'] = str(site.directory / 'mine')
    assert f'the download stays in {site.directory}/mine' in site.eb(image_address=docker)
    assert list((site.directory / 'mine').rglob('*'))


# --- GPUs


def test_driver_of_the_gpus(site, runtime):
    """Commands of the installation and plain `apptainer exec $SIF` get the libraries; the user can say no."""
    shutil.copy(smallimage.image(runtime, python=False), site.sources / 'small-1.0.sif')
    image = {'sources': ['small-1.0.sif'], 'checksums': [None], 'gpu_driver': 'nv'}
    site.eb(**image, site_gpu='any')
    text = site.module.read_text()
    assert 'setenv("APPTAINER_NV", "1")' in text and 'setenv("SINGULARITY_NV", "1")' in text
    asked = site.directory / 'asked'    # the runtime does not show its own variables inside
    asked.mkdir()
    (asked / 'singularity').write_text('#!/bin/sh\nprintf %s "$APPTAINER_NV$SINGULARITY_NV"\n')
    (asked / 'singularity').chmod(0o755)
    for env, seen in [({}, '11'), ({'APPTAINER_NV': '0'}, '00'), ({'SINGULARITY_NV': '0'}, '00')]:
        done = subprocess.run([site.root / 'bin/in-container', 'true'], capture_output=True, text=True,
                              env={**site.env, **env, 'PATH': f'{asked}:{site.env["PATH"]}'})
        assert (done.stdout, done.stderr) == (seen, ''), env
    out = site.eb('--rebuild', **image, site_gpu='rocm', check=False)
    assert site.status and "The image is for GPUs with cuda (gpu_driver = 'nv'), but this site's have rocm" in out


def test_fetch_first_then_install_without_network(site, docker, registry):
    """A rebuild for which the image cannot be pulled leaves the old installation."""
    site.eb('--fetch', image_address=docker)
    fetched, = site.sources.rglob('*.sif')
    assert fetched.name == f'small-1.0-{docker[-64:][:12]}.sif'
    assert not site.root.exists() or not list(site.root.glob('*.sif'))
    registry.refuse = 500
    site.eb(image_address=docker)
    assert (site.root / 'small-1.0.sif').read_bytes() == fetched.read_bytes()
    assert site.facts()['origin'] == docker
    before = site.facts(), site.module.read_text()
    fetched.unlink()
    site.env['APPTAINER_DISABLE_CACHE'] = 'true'
    out = site.eb('--rebuild', image_address=docker, check=False)
    assert site.status != 0 and 'pulling' in out, out
    assert (site.facts(), site.module.read_text()) == before
    assert (site.root / 'small-1.0.sif').exists()


def test_pull_a_sif_through_oras(site, registry, runtime):
    registry.refuse = None
    image = smallimage.image(runtime, python=False)
    digest = registry.manifest(registry.add(b'{}', SIF_CONFIG), registry.add(image.read_bytes(), SIF_LAYER))
    site.eb(image_address=f'oras://{registry.host}/small@{digest}', checksums=[smallimage.sha256(image)])
    assert (site.root / 'small-1.0.sif').read_bytes() == image.read_bytes()


def test_registry_does_not_answer(site):
    with socket.socket() as unused:
        unused.bind(('127.0.0.1', 0))
        out = site.fails(image_address=f'docker://127.0.0.1:{unused.getsockname()[1]}/small@sha256:' + 'a' * 64)
    assert 'the registry does not answer' in out and "run 'eb --fetch' on a login node first" in out


def test_registry_for_members(site, docker, registry):
    """The runtime's own login opens it; the password gets into nothing that EasyBuild keeps."""
    registry.account = 'me:aVerySecretWord'
    site.env['HOME'] = str(site.directory)
    out = site.fails(image_address=docker)
    assert "the registry refuses access. Log in with 'apptainer registry login'" in out
    login = ['apptainer', 'registry', 'login', '--username', 'me', '--password-stdin', f'docker://{registry.host}']
    subprocess.run(login, env=site.env, input='aVerySecretWord', text=True, check=True, capture_output=True)
    site.eb(image_address=docker)
    kept = [path for path in site.eb_.prefix.rglob('*') if path.is_file() and path.suffix != '.sif']
    assert kept and not [path for path in kept if b'aVerySecretWord' in path.read_bytes()]


@pytest.mark.parametrize('what', ['manifest', 'layer'])
def test_digest_mismatch(site, docker, registry, layer, what):
    """What the registry delivers is not what the digest promises."""
    digest = docker.rsplit('@', 1)[1] if what == 'manifest' else 'sha256:' + hashlib.sha256(layer[0]).hexdigest()
    content = registry.blobs[digest]
    registry.blobs[digest] = content + b' ' if what == 'manifest' else content[:-1] + b'x'
    try:
        out = site.fails(image_address=docker)
    finally:
        registry.blobs[digest] = content
    assert 'does not have the digest in its address. Do not use it' in out


# --- definition files


def test_build_from_a_definition(site, runtime):
    image = smallimage.image(runtime, python=False)
    (site.sources / 'small.def').write_text(
        f'Bootstrap: localimage\nFrom: {image}\n%setup\n    cat beside.txt > $APPTAINER_ROOTFS/etc/beside\n'
        '%environment\n    export FROM_DEF=yes\n')
    (site.sources / 'beside.txt').write_text('from a file beside it\n')
    site.eb(sources=['small.def', 'beside.txt'], checksums=[None, None])
    assert (site.root / 'share/docker-defs/small.def').exists()
    assert site.facts()['transfer'] == 'build'
    done = subprocess.run([site.root / 'bin/in-container', 'sh', '-c', 'cat /etc/beside; echo $FROM_DEF'], env=site.env,
                          stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == 'from a file beside it\nyes\n'


def test_definition_that_cannot_be_built(site):
    (site.sources / 'small.def').write_text('Bootstrap: localimage\nFrom: /not/there.sif\n')
    out = site.fails(sources=['small.def'], checksums=[None])
    assert 'Building the image from small.def with' in out and '/not/there.sif' in out
