##
# Copyright 2026 the slingtorch authors
#
# This file is part of slingtorch, an EasyBuild bundle: it subclasses EasyBuild's classes and is distributed under
# the same licence, the GNU General Public License version 2 (see the file LICENSE).
##
"""
EasyBuild support for putting a container image (SIF) in place, whole and verified,
implemented as the base of the Singularity easyblock.
"""
import json
import os
import re

from easybuild.easyblocks.generic.imagetransfer import Flush, ImageTransfer, copy_and_hash, link
from easybuild.framework.easyconfig import CUSTOM
from easybuild.tools.build_log import EasyBuildError, EasyBuildExit, print_msg, print_warning
from easybuild.tools.config import build_option, source_paths
from easybuild.tools.filetools import copy_file, mkdir, read_file, remove, write_file

TRANSFERS = ['copy', 'reflink', 'hardlink', 'symlink']

# what a rebuild leaves alone (runscripts/container/make-squashfs)
USER_SOFTWARE = ['user-software', 'user-software.squashfs', '.user-software.lock', '.user-software.new',
                 '.user-software.old']

ADDRESS_REGEX = re.compile(r'^(docker|oras|library)://\S+$')
PINNED_REGEX = re.compile(r'[@:.]sha256[:.](?P<digest>[0-9a-f]{64})$')


class SingularityImage(ImageTransfer):
    """
    Puts a container image (SIF) in place: from the source path, from a registry, or built from a definition file.

    The image is read once: its sha256 is computed while it is copied to a hidden name in the installation directory.
    It appears under its own name when it is whole and verified, never before. That happens while checksums are
    verified, before anything of an earlier installation is touched: a rebuild that fails there leaves that as it was.

    The packages of the user (user-software, user-software.squashfs) outlive a rebuild.
    """

    @staticmethod
    def extra_options(extra_vars=None):
        """Easyconfig parameters for the image."""
        extra_vars = ImageTransfer.extra_options(extra_vars)
        extra_vars.update({
            'build_options': [[], "Options for '{singularity,apptainer} build', for example ['--fakeroot']", CUSTOM],
            'central_image_dirs': [[], "Directories of the site with copies of images: used when the own copy is "
                                       "missing, at installation and whenever the module is loaded", CUSTOM],
            'docker_defs': [[], "Names of files to put into share/docker-defs, found through the source path; empty: "
                                "the definition that the image itself holds, if any", CUSTOM],
            'image_address': [None, "Address of the image in a registry, pinned by digest: "
                                    "docker://NAME@sha256:..., oras://NAME@sha256:..., library://NAME:sha256.... "
                                    "Instead of 'sources'", CUSTOM],
            'image_name': [None, "File name of the image; None: that of the source, else <name>-<version>.sif", CUSTOM],
            'image_transfer': ['copy', "How an image on the source path gets into the installation directory: copy, "
                                       "or reflink, hardlink, symlink to share its space", CUSTOM],
            'verify_key': [None, "Fingerprint of the PGP key that must have signed the image (it must be in the "
                                 "keyring of the runtime), or name of a file with a public key (.pem) on the source "
                                 "path", CUSTOM],
        })
        return extra_vars

    def __init__(self, *args, **kwargs):
        """Initialise: nothing in an image is there to be compiled or linked against."""
        super().__init__(*args, **kwargs)
        self.image_facts = {}  # what image.json will say
        for variable in ['CMAKE_LIBRARY_PATH', 'CMAKE_PREFIX_PATH', 'CPATH', 'LD_LIBRARY_PATH', 'LIBRARY_PATH',
                         'XDG_DATA_DIRS']:
            self.module_load_environment.remove(variable)

    # --- names

    @property
    def first_source(self):
        """Name of the first source, '' if there is none."""
        sources = self.cfg['sources'] or ['']
        return sources[0]['filename'] if isinstance(sources[0], dict) else sources[0]

    @property
    def image_name(self):
        """File name of the image."""
        if self.cfg['image_name']:
            return self.cfg['image_name']
        if self.first_source.endswith('.sif'):
            return self.first_source
        return super().image_name

    @property
    def fetch_only(self):
        """Whether this is 'eb --fetch': sources are completed, nothing is installed."""
        return self.cfg['stop'] == 'fetch'

    # --- fetching

    def check_image_options(self):
        """Check the easyconfig parameters before any work is done."""
        if self.cfg['image_transfer'] not in TRANSFERS:
            raise EasyBuildError("Easyconfig parameter image_transfer is '%s': it must be one of %s",
                                 self.cfg['image_transfer'], ', '.join(TRANSFERS))
        address, source = self.cfg['image_address'], self.first_source
        if bool(address) == bool(source):
            raise EasyBuildError("The image must come from one place: name a SIF or a definition file as the first of "
                                 "'sources', or a registry with 'image_address', and not %s",
                                 'both' if address else 'neither')
        if source and not source.endswith(('.sif', '.def')):
            raise EasyBuildError("The first source is %s: it must be an image (.sif) or a definition file (.def)",
                                 source)
        if address and not ADDRESS_REGEX.match(address):
            raise EasyBuildError("Easyconfig parameter image_address is '%s': it must start with docker://, oras:// or "
                                 "library://", address)
        if address and not PINNED_REGEX.search(address):
            raise EasyBuildError("Easyconfig parameter image_address is '%s': a tag can mean another image tomorrow, "
                                 "so it must end in a digest: @sha256:... (library:// :sha256....). This prints it: "
                                 "'skopeo inspect --format {{.Digest}} %s'; registries also show it on their web pages",
                                 address, re.sub('^oras:', 'docker:', address))

    def obtain_file_raise_on_failure(self, filename, *args, **kwargs):
        """Find an image also in the central directories of the site, and say where to get one that is nowhere."""
        find = super().obtain_file_raise_on_failure
        if not filename.endswith('.sif') or kwargs.get('no_download') or kwargs.get('force_download') or self.dry_run:
            return find(filename, *args, **kwargs)
        path = find(filename, no_download=True, warning_only=True, alt_location=kwargs.get('alt_location'))
        unreadable = [] if not path or os.access(path, os.R_OK) else [path]
        if path and not unreadable:
            return path
        for directory in self.cfg['central_image_dirs']:
            central = os.path.join(directory, filename)
            if os.path.isfile(central) and os.access(central, os.R_OK):
                print_msg("taking the image from %s", central, log=self.log, silent=self.silent)
                return central
            if os.path.lexists(central):
                unreadable.append(central)
        if not unreadable and (self.cfg['source_urls'] or kwargs.get('urls')):
            return find(filename, *args, **kwargs)
        raise EasyBuildError(
            "The image %s %s.\nLooked in the source path (%s)%s.\n%sRemedy: put the image, or a link to it, into a "
            "directory and name that with --sourcepath=DIRECTORY:%s", filename,
            "cannot be read, ask its owner for read permission: " + ', '.join(unreadable) if unreadable
            else "was not found", ':'.join(source_paths()), ' and in ' + ', '.join(self.cfg['central_image_dirs'])
            if self.cfg['central_image_dirs'] else '',
            self.cfg['download_instructions'].strip() + '\n' if self.cfg['download_instructions'] else '',
            ':'.join(source_paths()), exit_code=EasyBuildExit.MISSING_SOURCES)

    def get_checksums_from_json(self, *args, **kwargs):
        """Look for checksums.json, but not in a dry run: EasyBuild 5.4 reads it there even if there is none."""
        return {} if self.dry_run else super().get_checksums_from_json(*args, **kwargs)

    def fetch_step(self, *args, **kwargs):
        """Find the sources, or pull the image: with --fetch to the source path, else to where it will be installed."""
        self.check_image_options()
        # no checksums here: EasyBuild would read an image of 10 GB once more
        super().fetch_step(skip_checksums=True)
        self.docker_def_paths = [self.obtain_file(name) for name in self.cfg['docker_defs']]

        address = self.cfg['image_address']
        if self.dry_run or not address:
            if self.dry_run and address:
                self.dry_run_msg("  * %s will be pulled from %s", self.image_name, address)
            return
        checksum = self.get_checksum_for(self.cfg['checksums'], filename=self.image_name, index=0)
        # with the digest in the name: another image of this version is not taken for it
        digest = PINNED_REGEX.search(address).group('digest')
        source_name = '%s-%s.sif' % (re.sub(r'\.sif$', '', self.image_name), digest[:12])
        path = self.obtain_file(source_name, no_download=True, warning_only=True)
        if not path:
            if self.fetch_only:
                path = os.path.join(source_paths()[0], self.name.lower()[0], self.name, source_name)
                part = path + '.part-%d' % os.getpid()
            else:
                path = part = self.staged = self.staged_path
                self.remove_leftovers()
            mkdir(os.path.dirname(path), parents=True)
            with self.removed_on_error(part):
                self.pull_image(address, part)
                self.check_sif(part)
                os.rename(part, path)
        self.src.insert(0, {'name': source_name, 'path': path, 'checksum': checksum, 'cmd': None,
                            'finalpath': self.builddir})

    # --- verifying while it is put in place

    def checksum_step(self):
        """Verify the checksums; that of the image while it is brought to its hidden name, so that it is read once."""
        image = self.src[0] if self.src and self.src[0]['path'].endswith('.sif') or self.staged else None
        if image is None or self.dry_run or self.fetch_only:
            if image and not self.dry_run:
                self.check_sif(image['path'])
            super().checksum_step()
            return
        sources, self.src = self.src, self.src[1:]
        try:
            super().checksum_step()
        finally:
            self.src = sources
        self.stage_image(image)

    def stage_image(self, image):
        """
        Bring an image to its hidden name in the installation directory, verified.

        :param image: entry of self.src
        """
        pulled = self.staged is not None
        source, target = image['path'], self.staged_path
        transfer = 'pull' if pulled else self.cfg['image_transfer']
        if not pulled:
            self.remove_leftovers()
        mkdir(self.installdir, parents=True)
        with self.removed_on_error(target):
            try:
                self.check_sif(source)
                if transfer == 'copy':
                    digest = copy_and_hash(source, target, self.image_name)
                    self.flush = Flush(target)
                else:
                    if not pulled:
                        link(transfer, source, target)
                    digest = copy_and_hash(target, None, self.image_name)
            except OSError as err:
                self.raise_copy_error(err, source)
            self.accept_image(target, digest, transfer, self.cfg['image_address'] or source)
            self.verify_image_checksum(source, image['checksum'], digest)

    def accept_image(self, path, digest, transfer, origin):
        """
        Check the image under its hidden name and note what image.json will say.

        :param path: the image
        :param digest: its sha256
        """
        self.check_sif(path)
        if self.cfg['verify_key']:
            self.verify_signature(path, self.cfg['verify_key'])
        library = PINNED_REGEX.search(origin) if origin.startswith('library://') else None
        if library and library.group('digest') != digest:
            raise EasyBuildError("The image from %s has the sha256 %s. Do not use it", origin, digest,
                                 exit_code=EasyBuildExit.FAIL_CHECKSUM)
        self.staged = path
        self.image_facts = {'file': self.image_name, 'sha256': digest, 'size': os.path.getsize(path), 'origin': origin,
                            'transfer': transfer}

    # --- steps

    def extract_step(self):
        """Nothing is unpacked, and no copy goes to the build directory but what a definition file needs."""
        if self.first_source.endswith('.def'):
            for src in self.src:
                copy_file(src['path'], os.path.join(self.builddir, src['name']))

    def configure_step(self):
        """There is nothing to configure."""

    def build_step(self):
        """Build the image if the source is a definition file."""
        if not self.first_source.endswith('.def'):
            return
        self.remove_leftovers()
        mkdir(self.installdir, parents=True)
        target = self.staged_path
        with self.removed_on_error(target):
            self.build_image(self.first_source, self.cfg['build_options'], target)
            if self.dry_run:
                return
            self.check_sif(target)
            self.accept_image(target, copy_and_hash(target, None, self.image_name), 'build', self.src[0]['path'])

    def make_installdir(self, dontcreate=None):
        """Remove what an earlier installation left, but not the packages of the user nor the new image."""
        untouched = self.dry_run or build_option('module_only') or self.cfg['keeppreviousinstall']
        if untouched or not os.path.isdir(self.installdir):
            super().make_installdir(dontcreate=dontcreate)
            return
        keep = set(USER_SOFTWARE + [os.path.basename(path) for path in [self.staged] if path])
        for name in os.listdir(self.installdir):
            if name not in keep and (name not in self.parts() or name in self.parts(stale=True)):
                remove(os.path.join(self.installdir, name))
        for name in keep & {'user-software', 'user-software.squashfs'} & set(os.listdir(self.installdir)):
            print_msg("keeping %s", os.path.join(self.installdir, name), log=self.log, silent=self.silent)

    def install_step(self):
        """Give the image its name, and write down what it is."""
        if self.dry_run:
            self.dry_run_msg("  * image %s will be put into %s", self.image_name, self.installdir)
            return
        target = os.path.join(self.installdir, self.image_name)
        os.rename(self.staged, target)
        write_file(os.path.join(self.installdir, 'image.json'),
                   json.dumps(self.image_facts, indent=4, sort_keys=True) + '\n')
        write_file(target + '.sha256', '%s  %s\n' % (self.image_facts['sha256'], self.image_name))
        print_msg("image %s, sha256 %s", self.image_name, self.image_facts['sha256'], log=self.log, silent=self.silent)
        self.install_definitions(target)

    def install_definitions(self, image):
        """Put the definition of the image into share/docker-defs: files of the easyconfig, else what the SIF holds."""
        directory = os.path.join(self.installdir, 'share', 'docker-defs')
        paths = self.docker_def_paths or [src['path'] for src in self.src if src['name'].endswith('.def')]
        for path in paths:
            copy_file(path, os.path.join(directory, os.path.basename(path)))
        if paths:
            return
        try:
            facts = self.spython_client("reading the definition that the image holds").inspect(image=image)
        except (EasyBuildError, ValueError) as err:
            print_warning("share/docker-defs is not made: %s" % err, log=self.log)
            return
        definition = facts.get('attributes', {}).get('deffile')
        if definition:
            write_file(os.path.join(directory, re.sub(r'\.sif$', '', self.image_name) + '.def'), definition)

    def find_image(self):
        """Path of the image as the module finds it, the own copy or a central one; None if there is none to be read."""
        for directory in [self.installdir] + self.cfg['central_image_dirs']:
            path = os.path.join(directory, self.image_name)
            if os.path.isfile(path) and os.access(path, os.R_OK):
                return path
        return None

    def recorded_facts(self):
        """What image.json says; {} where nothing is installed."""
        path = os.path.join(self.installdir, 'image.json')
        return json.loads(read_file(path)) if os.path.exists(path) else {}
