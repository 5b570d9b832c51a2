/* The component: its parameters, its start. */
#include "slim_btl.h"

#include <stdlib.h>
#include <string.h>

/* Least bytes of a fragment: room for the headers of ob1, and for some data. */
#define LEAST_SEND_SIZE 1024

struct slim_btl_module *slim_btl;

static char *if_include, *if_exclude, *transports, *verbs_ports;
static int verbose;
static size_t get_size;
static bool keeps_memory;

void slim_btl_log(int level, const char *text, size_t len)
{
    (void)level;
    opal_output(0, "btl:slim: %.*s", (int)len, text);
}

static int slim_open(void)
{
    return OPAL_SUCCESS;
}

static int slim_close(void)
{
    return OPAL_SUCCESS;
}

static void parameter(const char *name, const char *help, mca_base_var_type_t type, void *at)
{
    (void)mca_base_component_var_register(&mca_btl_slim_component.btl_version, name, help, type, NULL, 0, 0,
                                          OPAL_INFO_LVL_1, MCA_BASE_VAR_SCOPE_READONLY, at);
}

/* A fragment has at most max_send_size bytes, so an eager message must fit into it. A longer one would arrive without its end. */
static void reconcile(mca_btl_base_module_t *m)
{
    if (m->btl_max_send_size < LEAST_SEND_SIZE) {
        m->btl_max_send_size = LEAST_SEND_SIZE;
    }
    if (m->btl_eager_limit > m->btl_max_send_size) {
        m->btl_eager_limit = m->btl_max_send_size;
    }
    if (m->btl_rndv_eager_limit > m->btl_max_send_size) {
        m->btl_rndv_eager_limit = m->btl_max_send_size;
    }
}

static int slim_register(void)
{
    mca_btl_base_module_t *m = &mca_btl_slim_module;
    int rc;

    if_include = "";
    parameter("if_include",
              "Interfaces and networks to use for messages, separated by commas (for example \"eth0,10.1.0.0/16\"); "
              "empty: all that are up, but for those of if_exclude",
              MCA_BASE_VAR_TYPE_STRING, &if_include);
    if_exclude = "127.0.0.0/8,::1/128";
    parameter("if_exclude",
              "Interfaces and networks not to use, separated by commas; does not count if if_include is set. Where it "
              "leaves none, loopback is used",
              MCA_BASE_VAR_TYPE_STRING, &if_exclude);
    transports = "tcp";
    parameter("transports",
              "Kinds of transport for messages, the preferred one first: \"tcp\", or \"verbs,tcp\" (InfiniBand and "
              "RoCE where it works)",
              MCA_BASE_VAR_TYPE_STRING, &transports);
    verbs_ports = "";
    parameter("verbs_ports",
              "Ports of adapters to use for verbs, separated by commas (for example \"mlx5_0,mlx5_1:2\"); empty: all that have a "
              "link",
              MCA_BASE_VAR_TYPE_STRING, &verbs_ports);
    get_size = 256 * 1024;
    parameter("verbs_get_size",
              "Least bytes of a message that the receiver reads out of the sender's memory over verbs, without a copy; 0: none",
              MCA_BASE_VAR_TYPE_SIZE_T, &get_size);
    keeps_memory = false;
    parameter("verbs_keep_memory",
              "Whether memory stays registered after such a message, for the next one: only for programs whose memory goes away by calls that "
              "Open MPI notices",
              MCA_BASE_VAR_TYPE_BOOL, &keeps_memory);
    verbose = 0;
    parameter("verbose", "Messages of the component: 0 errors, 1 where it listens and what is odd, 2 each connection",
              MCA_BASE_VAR_TYPE_INT, &verbose);

    m->btl_eager_limit = 64 * 1024;
    m->btl_rndv_eager_limit = 64 * 1024;
    m->btl_max_send_size = 512 * 1024;
    m->btl_rdma_pipeline_send_length = 128 * 1024;
    m->btl_rdma_pipeline_frag_size = SIZE_MAX;
    m->btl_min_rdma_pipeline_size = 0;
    m->btl_exclusivity = MCA_BTL_EXCLUSIVITY_LOW + 200; /* more than btl/tcp, which uses the same lines */
    m->btl_latency = 100;
    m->btl_bandwidth = 1000;
    m->btl_flags = MCA_BTL_FLAGS_SEND | MCA_BTL_FLAGS_SEND_INPLACE;
    rc = mca_btl_base_param_register(&mca_btl_slim_component.btl_version, m);
    reconcile(m);
    return rc;
}

static mca_btl_base_module_t **slim_init(int *count, bool progress_threads, bool mpi_threads)
{
    const struct slim_btl_upcalls upcalls = {
        .module = &mca_btl_slim_module,
        .verbose = verbose,
        .survives_losses = slim_btl_survives_losses(),
        .deliver = slim_btl_deliver,
        .lost = slim_btl_lost,
        .log = slim_btl_log,
        .has_failed = slim_btl_has_failed,
    };
    mca_btl_base_module_t **modules;
    unsigned char blob[4096];
    bool reads;
    size_t len;
    int rc;

    (void)progress_threads;
    (void)mpi_threads;
    *count = 0;
    slim_btl = slim_btl_open(slim_btl_name(OPAL_PROC_MY_NAME), if_include, if_exclude, transports, verbs_ports, upcalls);
    if (NULL == slim_btl) {
        return NULL;
    }
    reads = slim_btl_offer_get(&mca_btl_slim_module, get_size, keeps_memory);
    len = slim_btl_blob(slim_btl, reads, blob, sizeof blob);
    modules = malloc(sizeof *modules);
    rc = OPAL_ERROR;
    if (NULL != modules && len <= sizeof blob) {
        OPAL_MODEX_SEND(rc, SLIM_BTL_SCOPE, &mca_btl_slim_component.btl_version, blob, len);
    }
    if (OPAL_SUCCESS != rc) {
        free(modules);
        slim_btl_end_get();
        slim_btl_close(slim_btl);
        slim_btl = NULL;
        return NULL;
    }
    if (slim_btl_survives_losses()) {
        /* Have events of the runtime handled in each call of opal_progress, as btl/tcp does, not every 10 ms. */
        opal_progress_event_users_increment();
    }
    modules[0] = &mca_btl_slim_module;
    *count = 1;
    return modules;
}

static int slim_progress(void)
{
    return NULL != slim_btl ? slim_btl_progress(slim_btl) : 0;
}

/* The only symbol that is seen from outside. */
__attribute__((visibility("default"))) mca_btl_base_component_t mca_btl_slim_component = {
    .btl_version =
        {
            MCA_BTL_DEFAULT_VERSION("slim"),
            .mca_open_component = slim_open,
            .mca_close_component = slim_close,
            .mca_register_component_params = slim_register,
        },
    .btl_data = {.param_field = MCA_BASE_METADATA_PARAM_CHECKPOINT},
    .btl_init = slim_init,
    .btl_progress = slim_progress,
};

_Static_assert(sizeof(mca_btl_base_component_t) == 280, "component");
_Static_assert(offsetof(mca_btl_base_component_t, btl_init) == 264, "btl_init");
_Static_assert(offsetof(mca_btl_base_component_t, btl_progress) == 272, "btl_progress");
