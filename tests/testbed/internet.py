# SPDX-License-Identifier: GPL-2.0-only
"""Package indexes and download sites under their own https addresses: a proxy of this machine answers for all of them.

So lock files, easyconfigs and defaults of pip, uv and EasyBuild stay as they are, and no request leaves the machine.
"""
import http.server
import os
import ssl
import sys
import threading
import urllib.parse

from easybuild.framework.easyconfig.templates import TEMPLATE_CONSTANTS

from slingtorch import lockfile

from . import run
from .wheels import sha256

# where pip, EasyBuild and PyTorch's lock files look by themselves
INDEX = lockfile.default_index(sys.executable)
SOURCES = TEMPLATE_CONSTANTS['PYPI_SOURCE'][0].partition('/%(')[0]
HOSTS = tuple(urllib.parse.urlsplit(address).hostname for address in (INDEX, SOURCES)) + ('download.pytorch.org',)


class Internet:
    """
    The proxy; to be stopped by stop().

    :ivar pages: {address: content} of everything that there is
    :ivar asked: addresses that were asked for
    :ivar env: variables with which pip, uv and EasyBuild go through it, and take nothing from elsewhere
    """

    def __init__(self, directory):
        directory.mkdir(parents=True)
        self.pages, self.asked = {}, []
        key = ['openssl', 'req', '-x509', '-nodes', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1']
        authority, site = directory / 'ca', directory / 'site'
        run([*key, '-keyout', f'{authority}.key', '-out', f'{authority}.pem', '-subj', '/CN=tests',
             '-addext', 'keyUsage=keyCertSign'])
        run([*key, '-CA', f'{authority}.pem', '-CAkey', f'{authority}.key', '-keyout', f'{site}.key', '-out',
             f'{site}.pem', '-subj', '/CN=sites', '-addext', 'basicConstraints=CA:FALSE',
             '-addext', 'subjectAltName=' + ','.join(f'DNS:{host}' for host in HOSTS)])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(f'{site}.pem', f'{site}.key')
        internet = self

        class Handler(http.server.BaseHTTPRequestHandler):
            host = ''

            def do_CONNECT(self):
                self.host = self.path.partition(':')[0]
                if self.host not in HOSTS:
                    internet.asked.append(f'https://{self.host}/')
                    self.send_error(403)
                    return
                self.send_response(200)
                self.end_headers()
                self.close_connection = False
                self.request = context.wrap_socket(self.connection, server_side=True)
                self.setup()

            def do_GET(self, body=True):
                address = f'https://{self.host}{urllib.parse.unquote(self.path)}'
                internet.asked.append(address)
                content = internet.pages.get(address)
                self.send_response(404 if content is None else 200)
                self.send_header('Content-Type', 'text/html' if address.endswith('/') else 'application/octet-stream')
                self.send_header('Content-Length', str(len(content or b'')))
                self.end_headers()
                self.wfile.write(content or b'' if body else b'')

            def do_HEAD(self):
                self.do_GET(body=False)

            def log_message(self, *args):
                pass

        Handler.protocol_version = 'HTTP/1.1'
        self.server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        proxy = f'http://127.0.0.1:{self.server.server_port}'
        self.env = {
            **dict.fromkeys(['https_proxy', 'HTTPS_PROXY', 'http_proxy', 'HTTP_PROXY'], proxy),
            **dict.fromkeys(['all_proxy', 'ALL_PROXY', 'no_proxy', 'NO_PROXY']),
            **dict.fromkeys(name for name in os.environ if name.startswith(('PIP_', 'UV_'))),
            # one of requests' variables would be stronger than pip's own
            **dict.fromkeys(['SSL_CERT_FILE', 'PIP_CERT', 'REQUESTS_CA_BUNDLE', 'CURL_CA_BUNDLE'], f'{authority}.pem'),
            'PIP_CONFIG_FILE': os.devnull, 'PIP_NO_CACHE_DIR': '1', 'UV_CACHE_DIR': str(directory / 'uv')}

    def stop(self):
        self.server.shutdown()
        self.server.server_close()

    def add_wheel(self, index, wheel):
        """Put a wheel on a package index, which tells its hash (PEP 503)."""
        page = f'{index}/{wheel.name.split("-")[0].replace("_", "-")}/'
        link = f'<a href="{urllib.parse.quote(wheel.name)}#sha256={sha256(wheel)}">{wheel.name}</a>\n'
        self.pages[page] = self.pages.get(page, b'<!DOCTYPE html>') + link.encode()
        self.pages[page + wheel.name] = wheel.read_bytes()
