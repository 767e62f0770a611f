#include "elastic_group.hpp"

#ifdef C10D_BACKEND_HAS_RECONFIGURE

namespace zcomm::c10d_binding {

ElasticGroup::ElasticGroup(int rank, int size, c10::intrusive_ptr<ZcommOptions> options, std::string handle, Make make)
    : Backend(rank, size), options_(std::move(options)), handle_(std::move(handle)), make_(std::move(make)) {
  init();
}

ElasticGroup::Group ElasticGroup::members() const {
  const std::lock_guard lock(mutex_);
  return members_;
}

ElasticGroup::Group ElasticGroup::now() const {
  Group members = this->members();
  TORCH_CHECK(members, "zcomm: group: expected reconfigure() before its first call, as it has enable_reconfigure");
  return members;
}

WorkPtr ElasticGroup::reconfigure(const ::c10d::ReconfigureOptions& opts) {
  const Group before = members();
  const Group made = make_(opts, [&] {
    const WithoutGil no_gil;
    if (before) before->abort();
  });
  made->setTimeout(options_->timeout);  // that of `opts` was for connecting
  made->setGroupUid(getGroupUid());
  made->setGroupDesc(getGroupDesc());
  if (before) made->take_counters(*before);
  {
    const std::lock_guard lock(mutex_);
    members_ = made;
    rank_ = made->getRank();
    size_ = made->getSize();
  }
  return combine({});
}

void ElasticGroup::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  if (const Group members = this->members()) members->setGroupUid(uid);
}

void ElasticGroup::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  if (const Group members = this->members()) members->setTimeout(timeout);
}

::c10d::ErrorType ElasticGroup::getError() {
  const Group members = this->members();
  return members ? members->getError() : ::c10d::ErrorType::SUCCESS;
}

void ElasticGroup::abort() {
  if (const Group members = this->members()) members->abort();
}

void ElasticGroup::shutdown() {
  if (const Group members = this->members()) members->shutdown();
}

}  // namespace zcomm::c10d_binding

#endif
